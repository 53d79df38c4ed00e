"""One forward pass over a layout: the choice of kernels and of attention, in one place.

Invariant: hidden states come back by the layout's own flat index, whatever was padded for the kernels'
sake; the kind of kernels changes speed and memory, never what is computed.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from art_core.errors import ConfigError
from art_core.training import attention
from art_core.training.attention import BLOCK, TreeMask, padded_exits
from art_core.training.kernels import Attend, FusedDecoder
from art_core.training.layout import Layout

logger = logging.getLogger(__name__)

Kernels = Literal["auto", "fused", "modules"]
"""``fused``: the functions of `kernels`; ``modules``: transformers' and PEFT's own; ``auto``: fused on CUDA
for the models that they know, else the modules."""

AdapterCompute = Literal["auto", "model", "float32"]
"""Type in which adapters compute under fused kernels: the model's, or float32. ``auto`` is the model's."""


class LayoutForward:
    """Runs a causal language model over layouts.

    Args:
        model: of transformers, its linear layers adapted by PEFT.
        kernels: what runs the layers.
        adapter_compute: type in which adapters compute under fused kernels.

    Raises:
        ConfigError: fused kernels were asked for by name and do not know this model.
    """

    def __init__(
        self, model: Any, *, kernels: Kernels = "auto", adapter_compute: AdapterCompute = "auto"
    ) -> None:
        self._model = model
        self._fused: FusedDecoder | None = None
        cuda = model.device.type == "cuda"
        if kernels == "fused" or (kernels == "auto" and cuda):
            try:
                self._fused = FusedDecoder(model, exact=adapter_compute == "float32")
            except ConfigError as unknown:
                if kernels == "fused":
                    raise
                logger.info("transformers' own modules run this model: %s", unknown)

    @property
    def fused(self) -> bool:
        """Whether fused kernels run."""
        return self._fused is not None

    def __call__(self, layout: Layout, *, checkpointing: bool = False, dropping: bool = False) -> Tensor:
        """Hidden states by flat index; padding for the kernels' sake follows  [places or more, width].

        Args:
            layout: what to compute.
            checkpointing: keep the layers' inputs alone and compute the rest again in backward.
            dropping: adapters drop something now, which only the modules know how to do.
        """
        device = self._model.device
        token_ids, positions, mask = _padded(layout, device)
        ids = torch.from_numpy(token_ids).to(device)
        places = torch.from_numpy(np.ascontiguousarray(positions)).to(device)
        if self._fused is not None and not dropping:
            hidden = self._fused.run(ids, places, attend_by(mask), checkpointing=checkpointing)
        else:
            with _checkpointed(self._model.get_decoder(), checkpointing):
                hidden = self._model.get_decoder()(
                    input_ids=ids,
                    position_ids=places,
                    attention_mask=_for_modules(mask),
                    use_cache=False,
                ).last_hidden_state
        return hidden.flatten(0, 1)


def _padded(layout: Layout, device: torch.device) -> tuple[np.ndarray, np.ndarray, TreeMask | None]:
    """On CUDA masked layouts are filled up to whole blocks; the places added see themselves alone."""
    if layout.exits is None:
        return layout.token_ids, layout.positions, None
    n = layout.token_ids.shape[1]
    length = -(-n // BLOCK) * BLOCK if device.type == "cuda" else n
    more = ((0, 0), (0, length - n))
    mask = TreeMask(padded_exits(layout.exits, length), device)
    return np.pad(layout.token_ids, more), np.pad(layout.positions, more), mask


def attend_by(mask: TreeMask | None) -> Attend:
    """Attention of fused kernels under a mask; None: plainly causal."""
    if mask is None:
        return attention.causal
    if mask.device.type == "cuda":
        blocks = mask.blocks()
        return lambda q, k, v, scale: attention.flex(q, k, v, blocks, scale)
    matrix = mask.dense()
    return lambda q, k, v, scale: attention.dense(q, k, v, matrix, scale)


def _for_modules(mask: TreeMask | None) -> Any:
    if mask is None:
        return None
    return mask.blocks() if mask.device.type == "cuda" else mask.dense()


@contextmanager
def _checkpointed(decoder: Any, wanted: bool) -> Generator[None]:
    """Let transformers' layers checkpoint inside the block.

    They do so in training mode only. The layers alone are put into it: what lies inside them, and could
    drop something, stays as it is.
    """
    if not wanted or not torch.is_grad_enabled():
        yield
        return
    layers = list(decoder.layers)
    if not getattr(layers[0], "gradient_checkpointing", False):
        decoder.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        for layer in layers:
            layer.training = True
        yield
    finally:
        for layer in layers:
            layer.training = False
