"""Choosing the next token.

Invariant: what a sequence samples depends on its own logits, parameters, seed and position alone,
never on what else is in the batch.

The returned log-probabilities are of the distribution that was sampled from, after biases, penalties,
temperature, top-k, top-p and min-p, as vLLM returns them with ``--logprobs-mode processed_logprobs``; of a
greedy token they are those at temperature 1. Randomness is one uniform number per token, drawn
from the sequence's own generator and put through the inverse of the cumulative distribution.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from art_core.errors import EngineError
from art_core.inference.embedded.shaping import Shaping, shape

BLOCK = 128
"""Tokens in a block of the two-stage search; divides the vocabularies of most models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends.

    Attributes:
        max_tokens: most tokens to sample.
        temperature: 0 takes the likeliest token.
        top_p: smallest set of likeliest tokens whose probability reaches it; 1 for all.
        top_k: how many of the likeliest tokens remain; 0 for all.
        min_p: tokens less likely than this share of the likeliest's probability are left out; 0 for none.
        shaping: biases and penalties.
        seed: of the first choice; choice i has a generator of its own.
        stop: texts that end the completion; not part of its text, but their tokens stay.
        stop_token_ids: tokens that end it, the model's end tokens included.
        top_logprobs: how many alternatives to report for each token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    shaping: Shaping = field(default_factory=Shaping)
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
        prompt: ids before the completion; penalties need them.
        sampled: ids of the completion so far; likewise.
    """

    row: int
    params: SamplingParams
    uniform: float
    prompt: Sequence[int] = ()
    sampled: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """The outcome.

    Attributes:
        token: its id.
        logprob: its natural-log probability in what it was sampled from; at temperature 1 if it is greedy.
        top: the likeliest ids with theirs, as many as were asked for and could have been sampled.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """Sample once for each draw.

    Args:
        logits: [rows, vocabulary] in float32; several draws may share a row.
        draws: who samples from which row.

    Raises:
        EngineError: a row's logits are not finite.
    """
    totals = logits.logsumexp(dim=-1)
    if not bool(totals.isfinite().all()):
        raise EngineError(
            "the model's logits are not finite: its weights or its adapter hold NaN or infinity; "
            "go back to an earlier version, and train with a lower learning rate"
        )
    shaped, moved = _shaped(logits, draws)
    tokens, cut = _choose(shaped, moved)
    rows = torch.tensor([draw.row for draw in draws], device=logits.device)
    chosen = (logits[rows, tokens] - totals[rows]).tolist()
    tops = _tops(logits, totals, draws)
    bent = [i for i, d in enumerate(draws) if _bent(d.params)]
    if bent:
        own = _distributions(shaped, [moved[i] for i in bent])
        for place, i in enumerate(bent):
            if i in cut:
                own[place] = cut[i]
        for i, logprob in zip(bent, own.gather(1, tokens[bent][:, None])[:, 0].tolist(), strict=True):
            chosen[i] = logprob
        for i, top in zip(bent, _likeliest(own, [draws[i] for i in bent]), strict=True):
            tops[i] = top
    return [Sampled(t, p, top) for t, p, top in zip(tokens.tolist(), chosen, tops, strict=True)]


def _shaped(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[torch.Tensor, Sequence[Draw]]:
    """Logits with further rows for draws with biases or penalties, and those draws pointed at them."""
    if not any(d.params.shaping.acts for d in draws):
        return logits, draws
    rows: list[torch.Tensor] = []
    moved: list[Draw] = []
    for draw in draws:
        if draw.params.shaping.acts:
            rows.append(shape(logits[draw.row], draw.params.shaping, draw.prompt, draw.sampled))
            draw = replace(draw, row=len(logits) + len(rows) - 1)
        moved.append(draw)
    return torch.cat([logits, torch.stack(rows)]), moved


def _bent(params: SamplingParams) -> bool:
    """Whether the distribution of its log-probabilities is another one than the model's own."""
    drawn = params.temperature > 0
    return params.shaping.acts or (drawn and (params.temperature != 1 or _cuts(params)))


def _distributions(shaped: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Log-probabilities before any cut, after all else  [draws, vocabulary]."""
    temperatures = [d.params.temperature or 1.0 for d in draws]
    divisor = torch.tensor(temperatures, dtype=shaped.dtype, device=shaped.device)[:, None]
    return torch.log_softmax(shaped[[d.row for d in draws]] / divisor, dim=-1)


def _choose(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The token of each draw [draws], and by number of each draw with cuts its logprobs [vocabulary]."""
    logprobs: dict[int, torch.Tensor] = {}
    tokens = torch.zeros(len(draws), dtype=torch.long, device=logits.device)
    greedy = [i for i, d in enumerate(draws) if d.params.temperature == 0]
    if greedy:
        tokens[greedy] = logits[[draws[i].row for i in greedy]].argmax(dim=-1)
    plain = [i for i, d in enumerate(draws) if d.params.temperature > 0 and not _cuts(d.params)]
    if plain:
        probs, index = _tempered(logits, [draws[i] for i in plain])
        tokens[plain] = _invert(probs, index, [draws[i].uniform for i in plain])
    cut = [i for i, d in enumerate(draws) if d.params.temperature > 0 and _cuts(d.params)]
    if cut:
        probs, index = _tempered(logits, [draws[i] for i in cut])
        kept, order = _cut(probs[index], [draws[i].params for i in cut])
        places = _invert(kept, torch.arange(len(cut), device=logits.device), [draws[i].uniform for i in cut])
        tokens[cut] = order.gather(1, places[:, None])[:, 0]
        shares = (kept / kept.sum(dim=-1, keepdim=True)).log().to(logits.dtype)
        logprobs = dict(zip(cut, torch.empty_like(shares).scatter_(1, order, shares), strict=True))
    return tokens, logprobs


def _cuts(params: SamplingParams) -> bool:
    return params.top_p < 1 or params.top_k > 0 or params.min_p > 0


def _tempered(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each distinct distribution once  [distributions, vocabulary], and which one each draw has  [draws]."""
    place: dict[tuple[int, float], int] = {}
    index = [place.setdefault((d.row, d.params.temperature), len(place)) for d in draws]
    temperatures = torch.tensor([t for _, t in place], dtype=logits.dtype, device=logits.device)
    probs = torch.softmax(logits[[row for row, _ in place]] / temperatures[:, None], dim=-1)
    return probs, torch.tensor(index, device=logits.device)


def _cut(probs: torch.Tensor, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """Min-p, top-k, then top-p; returns what remains, likeliest first, and the token ids in that order."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    top_k = torch.tensor([p.top_k or probs.shape[1] for p in params], device=probs.device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=probs.device)
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=probs.device)
    ordered = ordered.double()
    ordered = ordered * (rank < top_k[:, None]) * (ordered >= min_p[:, None] * ordered[:, :1])
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    before = ordered.cumsum(dim=-1) - ordered
    return ordered * ((before < top_p[:, None]) | (rank == 0)), order


def _invert(weights: torch.Tensor, index: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """Put uniform numbers through the inverse cumulative distribution.

    In two stages, first to a block of the vocabulary and then inside it, both in float64: a cumulative
    sum over the whole vocabulary would be slower, and in float32 would lose the tail.

    Args:
        weights: [distributions, vocabulary]; need not sum to exactly 1.
        index: each draw's distribution  [draws].
        uniforms: each draw's number  [draws].

    Returns:
        Places in the vocabulary whose weight is never 0  [draws].
    """
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[1] % BLOCK))
    blocks = padded.view(weights.shape[0], -1, BLOCK)
    ends = blocks.sum(dim=-1).double().cumsum(dim=-1)[index]
    target = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)[:, None] * ends[:, -1:]
    block = _first_above(ends, target)
    start = torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    inside = blocks[index, block[:, 0]].double().cumsum(dim=-1)
    return (block * BLOCK + _first_above(inside, target - start))[:, 0]


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first place whose cumulative sum exceeds the target, which rounding must not push past the end."""
    last = cumulative[:, -1:]
    return torch.searchsorted(cumulative, torch.minimum(target, last * (1 - 1e-12)), right=True)


def _tops(
    logits: torch.Tensor, totals: torch.Tensor, draws: Sequence[Draw]
) -> list[tuple[tuple[int, float], ...]]:
    most = max(d.params.top_logprobs for d in draws)
    if not most:
        return [()] * len(draws)
    values, ids = logits.topk(min(most, logits.shape[1]), dim=-1)
    logprobs = (values - totals[:, None]).tolist()
    listed = [tuple(zip(i, p, strict=True)) for i, p in zip(ids.tolist(), logprobs, strict=True)]
    return [listed[d.row][: d.params.top_logprobs] for d in draws]


def _likeliest(logprobs: torch.Tensor, draws: Sequence[Draw]) -> list[tuple[tuple[int, float], ...]]:
    """The same from distributions of their own [draws, vocabulary], without what cannot be sampled."""
    most = max(d.params.top_logprobs for d in draws)
    if not most:
        return [()] * len(draws)
    values, ids = (found.tolist() for found in logprobs.topk(min(most, logprobs.shape[1]), dim=-1))
    return [
        tuple((t, p) for t, p in zip(i, v, strict=True) if p > -math.inf)[: d.params.top_logprobs]
        for i, v, d in zip(ids, values, draws, strict=True)
    ]
