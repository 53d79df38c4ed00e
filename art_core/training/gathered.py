"""Weights of decoder layers for kernels that read them past their modules, gathered when they are sharded.

Invariant: kernels see whole weights from the moment that they use them until the backward pass through that
use is over; otherwise at most three layers of a sharded model lie whole on a GPU. Every rank gathers the
same layers in the same order.

FSDP2 (Zhao et al. 2023, arXiv:2304.11277) gathers in hooks of the modules, which fused kernels do not run.
Its modules can also be asked: `Gathered` asks for a layer before it is used, and for the next one ahead of
its use, so that weights travel while the GPU computes, and gives both back afterwards.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule

from art_core.training.layer_functions import Layer, layer_weights


class Gathered:
    """The layers of one decoder.

    Args:
        layers: modules; sharded ones are `FSDPModule`.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._sharded = any(isinstance(layer, FSDPModule) for layer in layers)

    def __len__(self) -> int:
        return len(self._layers)

    def weights(self, number: int) -> Layer:
        """A layer's weights; of a sharded layer, they are whole while it is held."""
        return layer_weights(self._layers[number])

    def scale(self, number: int) -> float:
        """What a layer's attention multiplies scores by."""
        return self._layers[number].self_attn.scaling

    def hold(self, number: int, following: int) -> None:
        """Gather a layer, and begin with the next one that is used; beyond the ends there is none."""
        if not self._sharded:
            return
        self._layers[number].unshard()
        if 0 <= following < len(self._layers):
            self._layers[following].unshard(async_op=True)

    def release(self, number: int) -> None:
        """Let go of what others hold of a layer; beyond the ends there is none."""
        if self._sharded and 0 <= number < len(self._layers):
            self._layers[number].reshard()

    @contextmanager
    def held(self, number: int, following: int) -> Generator[Layer]:
        """A layer's weights inside the block."""
        self.hold(number, following)
        try:
            yield self.weights(number)
        finally:
            self.release(number)

    def before_backward(self, of: Sequence[Tensor], work: Callable[[], None]) -> None:
        """Do something when the gradients of all these tensors are known, and nothing behind them has run."""
        if self._sharded and torch.is_grad_enabled():
            register_multi_grad_hook(of, lambda _: work())
