"""Log-probabilities of chosen tokens from hidden states, through a frozen head.

Invariant: logits exist for one chunk of rows at a time, in the head's own type, and are computed again in
the backward pass; what is kept is one log-sum-exp and one entropy a row.

The gradient is written out, since autograd's would pass over ``[rows, vocabulary]`` in float32 many times.
With p = softmax(logits), l = log p[token] and H the entropy:

    dl / dlogits = onehot(token) - p          dH / dlogits = -p (log p + H)

At a temperature T, p = softmax(logits / T), and both are divided by T once more.

Products run in the head's type, everything else in float32. On CUDA the two passes over logits are compiled.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

ELEMENTS = {"cuda": 2**26, "cpu": 2**23}
"""Logits that exist at the same time, by device."""


def rows_at_a_time(vocabulary: int, device: torch.device) -> int:
    """How many rows' logits fit into `ELEMENTS`."""
    return max(16, ELEMENTS.get(device.type, ELEMENTS["cpu"]) // vocabulary)


def frozen_head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor,
    tokens: Tensor,
    *,
    temperature: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of chosen tokens, and entropies, both with a gradient for the hidden states.

    Args:
        hidden: [rows, width].
        weight: the head's, which gets no gradient  [vocabulary, width].
        rows: which row each target is read at, ascending; better in the host's memory, since where chunks
            begin is decided there  [targets].
        tokens: [targets].
        temperature: what each row's logits are divided by, in float32; None: nothing  [rows].
        chunk: rows whose logits exist at the same time; None: `rows_at_a_time`.

    Returns:
        Log-probabilities [targets] and entropies in nats [rows], in float32.
    """
    limit = rows_at_a_time(len(weight), hidden.device) if chunk is None else chunk
    count = max(1, -(-len(hidden) // limit))
    size = -(-len(hidden) // count)  # chunks of one size are one case to the compiler
    edges = torch.arange(0, count + 1, device=rows.device) * size
    bounds = torch.searchsorted(rows, edges).tolist()
    at = rows.to(hidden.device, non_blocking=True)
    return _FrozenHead.apply(hidden, weight, at, tokens, temperature, size, list(pairwise(bounds)))


def _statistics(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and entropy of each row."""
    wide = logits.float()
    total = torch.logsumexp(wide, dim=-1)
    # A token that a mask made impossible has logit -inf and adds nothing: entr(0) is 0.
    return total, torch.special.entr((wide - total[:, None]).exp()).sum(-1)


def _logit_gradients(
    logits: Tensor, total: Tensor, entropy: Tensor, by_row: Tensor, by_entropy: Tensor
) -> Tensor:
    """What reaches the logits, but for the targets' own; in the logits' type  [rows, vocabulary].

    Args:
        logits: [rows, vocabulary].
        total: their log-sum-exp  [rows].
        entropy: [rows].
        by_row: gradients of the row's targets, summed  [rows].
        by_entropy: gradient of the row's entropy  [rows].
    """
    logprob = logits.float() - total[:, None]
    known = torch.where(torch.isfinite(logprob), logprob, 0.0)
    gradient = -logprob.exp() * (by_row[:, None] + by_entropy[:, None] * (known + entropy[:, None]))
    return gradient.to(logits.dtype)


def _logits(part: Tensor, weight: Tensor, temperature: Tensor | None, start: int) -> Tensor:
    """Logits of one chunk of rows, the first of them number ``start``  [rows, vocabulary]."""
    logits = part @ weight.t()
    if temperature is None:
        return logits
    return logits.float() / temperature[start : start + len(part), None]


_compiled: dict[str, Any] = {}


def _maybe_compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    if device.type != "cuda":
        return function
    return _compiled.setdefault(function.__name__, torch.compile(function))


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        rows: Tensor,
        tokens: Tensor,
        temperature: Tensor | None,
        size: int,
        bounds: list[tuple[int, int]],
    ) -> tuple[Tensor, Tensor]:
        statistics = _maybe_compiled(_statistics, hidden.device)
        totals: list[Tensor] = []
        entropies: list[Tensor] = []
        chosen: list[Tensor] = []
        for i, (part, (start, end)) in enumerate(zip(hidden.split(size), bounds, strict=True)):
            logits = _logits(part, weight, temperature, i * size)
            total, entropy = statistics(logits)
            totals.append(total)
            entropies.append(entropy)
            chosen.append(logits[rows[start:end] - i * size, tokens[start:end]].float())
        total, entropy = torch.cat(totals), torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, rows, tokens, temperature, total, entropy)
        ctx.size, ctx.bounds = size, bounds
        return torch.cat(chosen) - total[rows], entropy

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, rows, tokens, temperature, total, entropy = ctx.saved_tensors
        gradients = _maybe_compiled(_logit_gradients, hidden.device)
        by_row = torch.zeros_like(total).index_add_(0, rows, by_logprob)
        size = ctx.size
        found: list[Tensor] = []
        for i, (part, (start, end)) in enumerate(zip(hidden.split(size), ctx.bounds, strict=True)):
            own = slice(i * size, i * size + len(part))
            logits = _logits(part, weight, temperature, i * size)
            gradient = gradients(logits, total[own], entropy[own], by_row[own], by_entropy[own])
            places = rows[start:end] - i * size, tokens[start:end]
            gradient.index_put_(places, by_logprob[start:end].to(gradient.dtype), accumulate=True)
            if temperature is not None:
                gradient = (gradient / temperature[own, None]).to(weight.dtype)
            found.append(gradient @ weight)
        return torch.cat(found), None, None, None, None, None, None
