"""Attention kernels that give and take log-sum-exps: whole rectangles, causal squares, chains.

Invariant: given the output and log-sum-exp of a softmax over more keys than it was shown, a kernel's backward
gives its own keys' part of that softmax's gradient.

They are torch's own operators (cuDNN's, FlashAttention's, the CPU's), called below autograd, which would not
let the joined log-sum-exp in. None is trusted: `trunk_attention.dense_kernel` tries them first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from art_core.training.token_tree import Ints

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class DenseKernel:
    """A kernel for attention without a mask, or causal among equally many queries and keys.

    Attributes:
        forward: (query, key, value, causal, scale) to output, log-sum-exp [1, heads, queries] and what
            ``backward`` wants back.
        backward: (gradient, query, key, value, output, log-sum-exp, kept, causal, scale) to the gradients
            of query, key and value.
    """

    forward: Callable[..., tuple[Tensor, Tensor, Any]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Any:
    out, lse, *kept, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=scale
    )
    return out, lse.view(lse.shape[:3]), kept


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Any, *how: Any
) -> Any:
    cum_q, cum_k, _, _, seed, offset = kept
    is_causal, scale = how
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse.contiguous()[..., None], seed, offset, None, cum_q, cum_k, q.shape[2],
        k.shape[2], 0.0, is_causal, scale=scale,
    )  # fmt: skip


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Any:
    out, lse, *kept, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
    return out, lse, kept


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Any, *how: Any
) -> Any:
    cum_q, cum_k, _, _, seed, offset = kept
    is_causal, scale = how
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), cum_q, cum_k, q.shape[2], k.shape[2], 0.0, is_causal, seed,
        offset, scale=scale,
    )  # fmt: skip


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Any:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    return out, lse, ()


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Any, *how: Any
) -> Any:
    is_causal, scale = how
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse.contiguous(), 0.0, is_causal, scale=scale
    )


def sharing_keys(kernel: DenseKernel) -> DenseKernel:
    """The same for kernels that want as many key heads as query heads."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Any:
        times = q.shape[1] // k.shape[1]
        return kernel.forward(q, k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1), *how)

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        times = q.shape[1] // k.shape[1]
        dq, dk, dv = kernel.backward(
            grad, q, k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1), *rest
        )
        return dq, dk.unflatten(1, (-1, times)).sum(2), dv.unflatten(1, (-1, times)).sum(2)

    return DenseKernel(forward, backward)


TILE = 128
"""Keys that one block of threads of a dense kernel's backward pass has for itself."""
MOST_SLICES = 4
SHORTEST_SLICE = 64
"""Queries in a slice: as many as a kernel takes at a time."""
WORTH_A_SLICE = 0.03
"""Share of the processors' time that another slice must win back."""


def query_slices(heads: int, queries: int, keys: int, processors: int) -> int:
    """Into how many slices to cut a rectangle's queries, so that few processors wait at the end.

    Kernels give each head's tile of keys to one processor, for all queries, and a processor has one at a
    time: 288 tiles on 132 processors take as long as 396 would. In slices there are more and smaller ones.

    Args:
        heads: of queries.
        queries: of each head.
        keys: of each head.
        processors: the device's (``multi_processor_count``).
    """
    tiles = heads * -(-keys // TILE)

    def busy(slices: int) -> float:
        rounds = -(-tiles * slices // processors)
        return tiles * slices / (rounds * processors)

    possible = range(1, min(MOST_SLICES, max(1, queries // SHORTEST_SLICE)) + 1)
    best = max(busy(slices) for slices in possible)
    return next(slices for slices in possible if busy(slices) >= best - WORTH_A_SLICE)


def in_slices(kernel: DenseKernel, slices: Callable[[int, int, int], int] | None = None) -> DenseKernel:
    """The same with a backward pass that takes a rectangle's queries in slices, as rows of a batch.

    Args:
        kernel: what computes them.
        slices: how many, by heads, queries and keys; None: `query_slices` of the device.
    """

    def count(q: Tensor, k: Tensor) -> int:
        heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
        if slices is not None:
            return slices(heads, queries, keys)
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        return query_slices(heads, queries, keys, processors)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Any, *how: Any
    ) -> Any:
        is_causal, scale = how
        rows = 1 if is_causal else count(q, k)
        if rows == 1:
            return kernel.backward(grad, q, k, v, out, lse, kept, is_causal, scale)
        length = q.shape[2] // rows
        whole = rows * length

        def sliced(t: Tensor) -> Tensor:
            return t[:, :, :whole].unflatten(2, (rows, length))[0].transpose(0, 1)

        shared = (t.expand(rows, -1, -1, -1) for t in (k, v))
        found = kernel.backward(sliced(grad), sliced(q), *shared, sliced(out), sliced(lse), kept, *how)
        dq = found[0].transpose(0, 1).flatten(1, 2)[None]
        dk, dv = (g.sum(0, keepdim=True) for g in found[1:])
        if whole < q.shape[2]:
            rest = [t[:, :, whole:] for t in (grad, q, out, lse)]
            more = kernel.backward(rest[0], rest[1], k, v, rest[2], rest[3], kept, *how)
            dq, dk, dv = torch.cat([dq, more[0]], dim=2), dk + more[1], dv + more[2]
        return dq, dk, dv

    return DenseKernel(kernel.forward, backward)


@dataclass(frozen=True, slots=True)
class Chains:
    """Branches that branch no further: rows one after another, each causal by itself.

    Attributes:
        bounds: where each begins, and where the last one ends  [chains + 1].
        edges: the same on the device, as kernels take it.
        longest: places of the longest.
    """

    bounds: list[int]
    edges: Tensor
    longest: int


def chains_of(exits: Ints, device: torch.device) -> Chains | None:
    """A forest's chains; None when some tree of it branches."""
    bounds = [0]
    while bounds[-1] < len(exits):
        start = bounds[-1]
        end = int(exits[start])
        if (exits[start:end] != end).any():
            return None
        bounds.append(end)
    edges = torch.tensor(bounds, dtype=torch.int32, device=device)
    return Chains(bounds, edges, int(np.diff(bounds).max()))


def _rows(t: Tensor) -> Tensor:
    """[1, heads, n, width] as [n, heads, width]."""
    return t[0].transpose(0, 1)


def _flash_chains_forward(q: Tensor, k: Tensor, v: Tensor, chains: Chains, scale: float) -> Any:
    edges, most = chains.edges, chains.longest
    out, lse, *kept, _ = aten._flash_attention_forward(
        _rows(q), _rows(k), _rows(v), edges, edges, most, most, 0.0, True, False, scale=scale
    )
    return out.transpose(0, 1)[None], lse.reshape(1, q.shape[1], q.shape[2]), (kept, lse.shape)


def _flash_chains_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Any, *how: Any
) -> Any:
    (seed, offset), shape = kept
    chains, scale = how
    edges, most = chains.edges, chains.longest
    found = aten._flash_attention_backward(
        _rows(grad).contiguous(), _rows(q), _rows(k), _rows(v), _rows(out).contiguous(),
        lse.contiguous().view(shape), edges, edges, most, most, 0.0, True, seed, offset, scale=scale,
    )  # fmt: skip
    return tuple(g.transpose(0, 1)[None] for g in found)


def _cpu_chains_forward(q: Tensor, k: Tensor, v: Tensor, chains: Chains, scale: float) -> Any:
    parts = [
        sharing_keys(CPU).forward(*(t[:, :, a:b] for t in (q, k, v)), True, scale)
        for a, b in pairwise(chains.bounds)
    ]
    return torch.cat([p[0] for p in parts], dim=2), torch.cat([p[1] for p in parts], dim=2), ()


def _cpu_chains_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Any, *how: Any
) -> Any:
    chains, scale = how
    parts = [
        sharing_keys(CPU).backward(*(t[:, :, a:b] for t in (grad, q, k, v, out, lse)), kept, True, scale)
        for a, b in pairwise(chains.bounds)
    ]
    return tuple(torch.cat([p[i] for p in parts], dim=2) for i in range(3))


CUDNN = DenseKernel(_cudnn_forward, _cudnn_backward)
FLASH = DenseKernel(_flash_forward, _flash_backward)
CPU = DenseKernel(_cpu_forward, _cpu_backward)
CHAINS = {
    "cuda": DenseKernel(_flash_chains_forward, _flash_chains_backward),
    "cpu": DenseKernel(_cpu_chains_forward, _cpu_chains_backward),
}
"""Kernels for `Chains` in the place of causality, by device."""

CANDIDATES: dict[str, dict[str, DenseKernel]] = {
    "cuda": {
        "cudnn, queries in slices": in_slices(CUDNN),
        "cudnn": CUDNN,
        "flash, queries in slices": in_slices(FLASH),
        "flash": FLASH,
        "cudnn, keys repeated": sharing_keys(CUDNN),
        "flash, keys repeated": sharing_keys(FLASH),
    },
    "cpu": {"cpu": sharing_keys(CPU)},
}
"""By device, fastest first; the first that proves itself on a small case is used."""
