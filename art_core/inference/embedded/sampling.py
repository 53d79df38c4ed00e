"""Choosing the next token.

Invariant: what a sequence samples depends on its own logits, parameters, seed and position alone,
never on what else is in the batch.

The returned log-probabilities are of the model's own distribution, before temperature, top-k and
top-p, as vLLM returns them by default. Randomness is one uniform number per token, drawn from the
sequence's own generator and put through the inverse of the cumulative distribution.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends.

    Attributes:
        max_tokens: most tokens to sample.
        temperature: 0 takes the likeliest token.
        top_p: smallest set of likeliest tokens whose probability reaches it; 1 for all.
        top_k: how many of the likeliest tokens remain; 0 for all.
        seed: of the first choice; choice i has a generator of its own.
        stop: texts that end the completion; not part of its text, but their tokens stay.
        stop_token_ids: tokens that end it, the model's end tokens included.
        top_logprobs: how many alternatives to report for each token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    top_logprobs: int = 0

    def generator(self, choice: int) -> random.Random:
        """The uniform numbers of one choice: the same seed and choice give the same ones everywhere."""
        if self.seed is None:
            return random.Random(random.SystemRandom().getrandbits(64))
        return random.Random(f"{self.seed}/{choice}")


@dataclass(frozen=True, slots=True)
class Draw:
    """One sequence's turn.

    Attributes:
        row: its row in the logits.
        uniform: in [0, 1).
    """

    row: int
    params: SamplingParams
    uniform: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """The outcome.

    Attributes:
        token: its id.
        logprob: its natural-log probability under the model, before temperature and cuts.
        top: the likeliest ids with theirs, as many as were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """Sample once for each draw.

    Args:
        logits: [rows, vocabulary] in float32; several draws may share a row.
        draws: who samples from which row.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = _choose(logits, logprobs, draws)
    chosen = logprobs[torch.tensor([d.row for d in draws], device=logits.device), tokens].tolist()
    tops = _tops(logprobs, draws)
    return [Sampled(t, p, top) for t, p, top in zip(tokens.tolist(), chosen, tops, strict=True)]


def _choose(logits: torch.Tensor, logprobs: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    tokens = torch.zeros(len(draws), dtype=torch.long, device=logits.device)
    greedy = [i for i, d in enumerate(draws) if d.params.temperature == 0]
    if greedy:
        tokens[greedy] = logits[[draws[i].row for i in greedy]].argmax(dim=-1)
    # Draws that sample from the same distribution share its cumulative sum.
    shared: dict[tuple[int, float, float, int], list[int]] = {}
    for i, draw in enumerate(draws):
        p = draw.params
        if p.temperature > 0:
            shared.setdefault((draw.row, p.temperature, p.top_p, p.top_k), []).append(i)
    plain = {key: who for key, who in shared.items() if key[2] >= 1 and key[3] == 0}
    cut = {key: who for key, who in shared.items() if key not in plain}
    if plain:
        probs = _probabilities(logits, logprobs, list(plain))
        _invert(probs, None, list(plain.values()), draws, tokens)
    if cut:
        probs, order = _cut(_probabilities(logits, logprobs, list(cut)), list(cut))
        _invert(probs, order, list(cut.values()), draws, tokens)
    return tokens


def _probabilities(
    logits: torch.Tensor, logprobs: torch.Tensor, keys: list[tuple[int, float, float, int]]
) -> torch.Tensor:
    """Tempered probabilities in float64  [keys, vocabulary]."""
    rows = torch.tensor([key[0] for key in keys], device=logits.device)
    if all(key[1] == 1 for key in keys):
        return logprobs[rows].double().exp_()
    # In float64, so that a cumulative sum over a large vocabulary keeps its tail.
    temperatures = torch.tensor([key[1] for key in keys], dtype=torch.float64, device=logits.device)
    return torch.softmax(logits[rows].double() / temperatures[:, None], dim=-1)


def _cut(probs: torch.Tensor, keys: list[tuple[int, float, float, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k, then top-p; returns what remains, likeliest first, and the token ids in that order."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    vocabulary = probs.shape[1]
    top_k = torch.tensor([key[3] or vocabulary for key in keys], device=probs.device)
    top_p = torch.tensor([key[2] for key in keys], dtype=probs.dtype, device=probs.device)
    ordered = ordered * (torch.arange(vocabulary, device=probs.device) < top_k[:, None])
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = (before < top_p[:, None]) | (torch.arange(vocabulary, device=probs.device) == 0)
    return ordered * kept, order


def _invert(
    probs: torch.Tensor,
    order: torch.Tensor | None,
    groups: list[list[int]],
    draws: Sequence[Draw],
    tokens: torch.Tensor,
) -> None:
    """Put each draw's uniform number through its row's inverse cumulative distribution."""
    cumulative = probs.cumsum(dim=-1)
    width = max(len(who) for who in groups)
    uniforms = torch.tensor(
        [[draws[i].uniform for i in who] + [0.0] * (width - len(who)) for who in groups],
        dtype=probs.dtype,
        device=probs.device,
    )
    # right=True finds the first token whose cumulative sum exceeds the number: never one of probability 0.
    found = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    found = found.clamp_(max=probs.shape[1] - 1)
    if order is not None:
        found = order.gather(1, found)
    members = [i for who in groups for i in who]
    row = [r for r, who in enumerate(groups) for _ in who]
    column = [c for who in groups for c in range(len(who))]
    tokens[members] = found[row, column]


def _tops(logprobs: torch.Tensor, draws: Sequence[Draw]) -> list[tuple[tuple[int, float], ...]]:
    most = max(d.params.top_logprobs for d in draws)
    if not most:
        return [()] * len(draws)
    values, ids = logprobs.topk(most, dim=-1)
    listed = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return [tuple(listed[d.row][: d.params.top_logprobs]) for d in draws]
