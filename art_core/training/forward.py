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
from art_core.training.trunk_attention import TrunkAttention, dense_kernel, rectangle_share

logger = logging.getLogger(__name__)

WORTH_A_TRUNK = 0.5
"""Share of all pairs that must lie between branches and long trunks, for those to be computed apart."""

Kernels = Literal["auto", "fused", "modules"]
"""``fused``: the functions of `kernels`; ``modules``: transformers' and PEFT's own; ``auto``: fused on CUDA
for the models that they know, else the modules."""

Attention = Literal["auto", "flex", "trunk"]
"""How fused kernels attend to trees on CUDA. ``flex``: FlexAttention alone; ``trunk``: long trunks by a
dense kernel (`trunk_attention`); ``auto``: ``trunk`` where most of the work lies in one."""

AdapterCompute = Literal["auto", "model", "float32"]
"""Type in which adapters compute under fused kernels: the model's, or float32. ``auto`` is the model's."""


class LayoutForward:
    """Runs a causal language model over layouts.

    Args:
        model: of transformers, its linear layers adapted by PEFT.
        kernels: what runs the layers.
        adapter_compute: type in which adapters compute under fused kernels.
        attention: how trees are attended to under fused kernels.

    Raises:
        ConfigError: fused kernels were asked for by name and do not know this model.
    """

    def __init__(
        self,
        model: Any,
        *,
        kernels: Kernels = "auto",
        adapter_compute: AdapterCompute = "auto",
        attention: Attention = "auto",
    ) -> None:
        self._model = model
        self._attention: Attention = attention
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
        fused = None if dropping else self._fused
        trunk = fused is not None and self._by_trunk(layout)
        token_ids, positions, mask = _padded(layout, device, to_blocks=not trunk)
        ids = torch.from_numpy(np.ascontiguousarray(token_ids)).to(device)
        places = torch.from_numpy(np.ascontiguousarray(positions)).to(device)
        if fused is not None:
            attend = TrunkAttention(mask) if trunk and mask is not None else attend_by(mask)
            hidden = fused.run(ids, places, attend, checkpointing=checkpointing)
        else:
            with _checkpointed(self._model.get_decoder(), checkpointing):
                hidden = self._model.get_decoder()(
                    input_ids=ids,
                    position_ids=places,
                    attention_mask=_for_modules(mask),
                    use_cache=False,
                ).last_hidden_state
        return hidden.flatten(0, 1)

    def _by_trunk(self, layout: Layout) -> bool:
        """Whether a dense kernel takes this layout's trunks."""
        exits, device = layout.exits, self._model.device
        if exits is None or self._attention == "flex":
            return False
        if self._attention == "auto" and (device.type != "cuda" or rectangle_share(exits) < WORTH_A_TRUNK):
            return False
        config = self._model.config.get_text_config()
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        example = torch.empty(1, heads, 1, width, dtype=self._model.dtype, device=device)
        return dense_kernel(example, example[:, :shared]) is not None


def _padded(
    layout: Layout, device: torch.device, *, to_blocks: bool
) -> tuple[np.ndarray, np.ndarray, TreeMask | None]:
    """On CUDA masked layouts are filled up to whole blocks; the places added see themselves alone."""
    if layout.exits is None:
        return layout.token_ids, layout.positions, None
    n = layout.token_ids.shape[1]
    length = -(-n // BLOCK) * BLOCK if device.type == "cuda" and to_blocks else n
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
