"""What a request may change about a distribution before a token is drawn from it.

Invariant: a request that asks for nothing of this is untouched by it, and the model's own logits never
change; the log-probabilities that are reported are of the distribution that is sampled from.

Names, ranges and order are vLLM's: biases, least length, penalties; temperature and cuts come after.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """Settings of one request.

    Attributes:
        bias: what is added to tokens' logits, by id.
        presence: what is taken from the logit of a token that was sampled before.
        frequency: likewise, once for each time.
        repetition: what a positive logit is divided by, and a negative one multiplied with, of a token
            that stands in the prompt or was sampled (Keskar et al. 2019, arXiv:1909.05858); 1 for nothing.
        min_tokens: how many tokens come before one may end the completion.
        ends: the tokens that would.
    """

    bias: Mapping[int, float] = field(default_factory=dict[int, float])
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    min_tokens: int = 0
    ends: frozenset[int] = frozenset()

    @property
    def acts(self) -> bool:
        """Whether it changes anything."""
        penalties = self.presence or self.frequency or self.repetition != 1
        return bool(self.bias or penalties or (self.min_tokens and self.ends))


def shape(
    logits: torch.Tensor, shaping: Shaping, prompt: Sequence[int], sampled: Sequence[int]
) -> torch.Tensor:
    """Logits to sample from.

    Args:
        logits: the model's  [vocabulary].
        shaping: what to change.
        prompt: ids before the completion.
        sampled: ids of the completion so far.

    Returns:
        A tensor of its own  [vocabulary].
    """
    shaped = logits.clone()
    if shaping.bias:
        _add(shaped, shaping.bias)
    if len(sampled) < shaping.min_tokens and shaping.ends:
        shaped[sorted(shaping.ends)] = -torch.inf
    if shaping.repetition != 1:
        seen = torch.tensor(sorted({*prompt, *sampled}), device=logits.device)
        values = shaped[seen]
        shaped[seen] = torch.where(values > 0, values / shaping.repetition, values * shaping.repetition)
    if (shaping.presence or shaping.frequency) and sampled:
        counts = Counter(sampled)
        _add(shaped, {t: -shaping.presence - shaping.frequency * n for t, n in counts.items()})
    return shaped


def _add(logits: torch.Tensor, values: Mapping[int, float]) -> None:
    ids = torch.tensor(list(values), device=logits.device)
    logits[ids] += torch.tensor(list(values.values()), dtype=logits.dtype, device=logits.device)
