"""Attention among the places of a layout: who sees whom, in the form that each kernel takes.

Invariant: place ``q`` attends to place ``k`` exactly if ``k <= q < exits[k]``, whichever kernel runs.

From one column of integers, ``exits``, come a boolean matrix for SDPA (any device, quadratic memory), and
the block-sparse mask of FlexAttention (CUDA; Dong et al. 2024, arXiv:2412.05496). Which blocks of that
mask are empty, full or mixed follows from each block's smallest and largest exit, so nothing quadratic is
ever built for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from art_core.errors import ConfigError
from art_core.training.token_tree import Ints

BLOCK = 128
"""Places in a block of FlexAttention's mask."""

KERNEL_OPTIONS: Any = {"FORCE_USE_FLEX_ATTENTION": True}
"""Without it short rows go to a decoding kernel, which has no gradient and wants 2^n heads for a key head."""

TREE_ATTENTION = "art_tree"
"""transformers' name for the attention of this module: SDPA, and FlexAttention for a `BlockMask`."""


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Who sees whom among the places of one row.

    Attributes:
        exits: one past each place's last descendant  [places].
        device: where attention runs.
    """

    exits: Ints
    device: torch.device

    def dense(self) -> Tensor:
        """As transformers takes it for SDPA: booleans  [1, 1, places, places]."""
        at = torch.arange(len(self.exits), device=self.device)
        exits = torch.from_numpy(self.exits).to(self.device)
        return ((at[None, :] <= at[:, None]) & (at[:, None] < exits[None, :]))[None, None]

    def blocks(self, size: int = BLOCK) -> BlockMask:
        """As FlexAttention takes it."""
        some, whole = block_kinds(self.exits, size)
        exits = torch.from_numpy(self.exits.astype(np.int32)).to(self.device)
        numbers, indices = _listed(some & ~whole, self.device)
        full_numbers, full_indices = _listed(whole, self.device)
        return BlockMask.from_kv_blocks(
            numbers,
            indices,
            full_numbers,
            full_indices,
            BLOCK_SIZE=size,
            mask_mod=_interval_mask(exits),
            seq_lengths=(len(self.exits), len(self.exits)),
        )


def block_kinds(exits: Ints, size: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Which blocks of queries and keys hold some pair that attends, and which hold nothing else.

    Args:
        exits: one past each place's last descendant  [places].
        size: places in a block.

    Returns:
        Two boolean matrices  [blocks of queries, blocks of keys].
    """
    count = -(-len(exits) // size)
    filled = np.zeros(count * size, dtype=np.int64)
    filled[: len(exits)] = exits
    last = filled.reshape(count, size).max(axis=1)
    # Keys beyond the end see nobody, so the last block is full only when it is filled.
    first = filled.reshape(count, size).min(axis=1)
    block = np.arange(count)
    before = block[None, :] < block[:, None]
    some = before & (last[None, :] > block[:, None] * size)
    ends = np.minimum((block + 1) * size, len(exits))
    whole = before & (first[None, :] >= ends[:, None])
    return some | np.eye(count, dtype=bool), whole


def _listed(chosen: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each block of queries: how many blocks of keys, and which, those first."""
    numbers = chosen.sum(axis=1).astype(np.int32)
    indices = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    return (
        torch.from_numpy(numbers)[None, None].to(device),
        torch.from_numpy(indices)[None, None].to(device),
    )


def _interval_mask(exits: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < exits[key])

    return mask


def padded_exits(exits: Ints, length: int) -> Ints:
    """The same places, followed by places that see themselves alone."""
    return np.concatenate([exits, np.arange(len(exits), length) + 1])


_compiled: dict[str, Any] = {}


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """FlexAttention, compiled on CUDA: uncompiled it would hold all scores.

    Args:
        query: [1, heads, places, width].
        key: [1, key heads, places, width].
        value: [1, key heads, places, width].
        mask: who sees whom.
        scale: of the scores; None: 1 / sqrt(width).

    Returns:
        [1, heads, places, width].
    """
    run: Any = flex_attention
    if query.device.type == "cuda" and not torch.compiler.is_compiling():
        if "flex" not in _compiled:
            _compiled["flex"] = torch.compile(flex_attention)
        run = _compiled["flex"]
    return run(
        query,
        key,
        value,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=KERNEL_OPTIONS,
    )


def causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Plain causal attention; shapes as in `flex`, any number of rows."""
    shares = query.shape[1] != key.shape[1]
    if shares and query.device.type == "cuda" and query.dtype not in (torch.bfloat16, torch.float16):
        # Of CUDA's kernels for other types only the one that holds all scores lets heads share keys.
        key, value, shares = _repeated(key, query), _repeated(value, query), False
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=shares)


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """SDPA under a boolean matrix; shapes as in `flex`."""
    # Kernels that take a mask do not share keys among heads by themselves.
    key, value = _repeated(key, query), _repeated(value, query)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def _repeated(shared: Tensor, query: Tensor) -> Tensor:
    """Keys or values once for each head that shares them."""
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], dim=1)


def tree_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer; see `TREE_ATTENTION`.

    Raises:
        ConfigError: the model caps its scores or has attention sinks, which this attention has not.
    """
    if not isinstance(attention_mask, BlockMask):
        return sdpa_attention_forward(  # type: ignore[return-value]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown:
        raise ConfigError(f"this model's attention needs {', '.join(unknown)}, which a token tree has not")
    out = flex(query, key, value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


def register() -> str:
    """Make `TREE_ATTENTION` known to transformers; doing so twice is harmless.

    Returns:
        Its name, for ``attn_implementation``.
    """
    AttentionInterface.register(TREE_ATTENTION, tree_attention_forward)
    AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
    return TREE_ATTENTION
