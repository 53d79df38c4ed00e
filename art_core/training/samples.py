"""Samples: a prompt, what the policy answered, and what the answer was worth.

Invariant: every sampled token of a trainable step is in exactly one sample, and nothing else is. What
is left out is counted under its reason.

Trajectories become samples here; a `token_tree.TokenTree` is built of samples and knows nothing of
trajectories.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from art_core.errors import ConfigError
from art_core.selection import Train, choose
from art_core.types import Step, Trajectory

NO_ADVANTAGE = "no reward applies to it, or none that differs from those it is compared with"
"""Why a step is left out while others of its group are trained."""

TRUNCATED = "cut off by max_tokens"
"""Why a step is left out with ``mask_truncated``."""

OVERLONG = "longer than the model or max_sample_tokens allows"
"""Why a step is left out with ``overlong="drop"``, or cannot be shortened."""

Overlong = Literal["error", "drop", "truncate"]


@dataclass(frozen=True)  # without slots, for what is cached
class Sample:
    """One answer of the policy to one prompt.

    Attributes:
        prompt: ids that the model was given; context only  [prompt_tokens].
        completion: ids that are trained, end token included  [completion_tokens].
        logprobs: log-probability of each under the policy that sampled it; None where unknown, and where
            the server's are of another distribution  [completion_tokens].
        advantage: how much better than its group's baseline the rollout was.
        step: id of the step that it comes from.
        rollout: id of the trajectory that it comes from.
        temperature: the policy is softmax(logits / temperature), here and in `logprobs`; above 0.

    Raises:
        ValueError: the prompt is empty (nothing could predict the first token), the completion is
            empty, the lengths differ, or the temperature is not above 0.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    advantage: float
    step: str
    rollout: str
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.prompt or not self.completion:
            raise ValueError(f"sample of step {self.step} has no {'completion' if self.prompt else 'prompt'}")
        if len(self.completion) != len(self.logprobs):
            raise ValueError(
                f"sample of step {self.step}: {len(self.completion)} ids but {len(self.logprobs)} logprobs"
            )
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"sample of step {self.step}: temperature {self.temperature} is not above 0")

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and completion, one after the other."""
        return self.prompt + self.completion

    @property
    def row(self) -> npt.NDArray[np.int64]:
        """The same as an array  [tokens]."""
        return np.frombuffer(self.packed, dtype=">u4").astype(np.int64)

    @cached_property
    def packed(self) -> bytes:
        """The same, four bytes each, the highest first: in the order of the ids, quickly compared.

        Raises:
            ValueError: an id is negative, or has more than 32 bits.
        """
        try:
            ids = array("I", self.ids)
        except OverflowError as misfit:
            raise ValueError(f"sample of step {self.step} holds an id that is no token's: {misfit}") from None
        return np.array(ids, dtype=">u4").tobytes()


def trajectory_samples(
    trajectory: Trajectory,
    advantages: Mapping[str, float] | None = None,
    *,
    train: Train = None,
    include_superseded: bool = False,
    mask_truncated: bool = False,
) -> tuple[list[Sample], Counter[str]]:
    """The steps of a trajectory that are trained, as samples.

    Args:
        trajectory: a rollout.
        advantages: by step id; steps without one are left out. None: all are 1, to imitate them, which
            has nothing to do with how they were sampled: all temperatures are 1, too.
        train: the user's choice among its steps; None: every one that can be trained.
        include_superseded: also train attempts that a later one replaced.
        mask_truncated: leave out answers that ``max_tokens`` cut off (overlong filtering; DAPO,
            arXiv:2503.14476, section 3.4): their end says nothing about how good they were.

    Returns:
        Samples, and how many steps were left out, by reason.
    """
    chosen = choose(trajectory, train, include_superseded=include_superseded)
    left_out = Counter(chosen.left_out)
    samples: list[Sample] = []
    for step in chosen.steps:
        advantage = 1.0 if advantages is None else advantages.get(step.id)
        if advantage is None or step.tokens is None:
            left_out[NO_ADVANTAGE] += 1
            continue
        if mask_truncated and step.finish_reason == "length":
            left_out[TRUNCATED] += 1
            continue
        tokens = step.tokens
        temperature = 1.0 if advantages is None else trained_temperature(step.sampling)
        raw = has_raw_logprobs(step)
        samples.append(
            Sample(
                tokens.prompt,
                tokens.completion,
                (None,) * len(tokens.logprobs) if raw else tokens.logprobs,
                advantage,
                step.id,
                trajectory.id,
                temperature,
            )
        )
    return samples, left_out


def trained_temperature(sampling: Mapping[str, Any]) -> float:
    """The temperature at which a step's policy is computed: the one that it was sampled at.

    A greedy step (`is_greedy`) was drawn from no softmax; it is trained at 1, the temperature at which
    servers report its log-probabilities.

    Args:
        sampling: the step's; a request that names no temperature is sampled at 1.
    """
    return 1.0 if is_greedy(sampling) else _number(sampling, "temperature", 1.0)


def has_raw_logprobs(step: Step) -> bool:
    """Whether the server's log-probabilities are of another distribution than that which is trained.

    Those before temperature are, unless it was 1 (or 0: greedy steps are trained at 1).
    """
    return step.raw_logprobs and trained_temperature(step.sampling) != 1.0


def is_greedy(sampling: Mapping[str, Any]) -> bool:
    """Whether a step took the likeliest tokens; servers do so below a temperature of `GREEDY`."""
    return _number(sampling, "temperature", 1.0) < GREEDY


def is_reshaped(sampling: Mapping[str, Any]) -> bool:
    """Whether a step was drawn from something else than softmax(logits / temperature).

    So it is with cuts (``top_p``, ``top_k``, ``min_p``), penalties and biases. A greedy step isn't drawn.
    """
    if is_greedy(sampling):
        return False
    if sampling.get("logit_bias"):
        return True
    return any(_number(sampling, name, same[0]) not in same for name, same in _NEUTRAL.items())


GREEDY = 1e-5
"""Temperatures below this are 0 to vLLM (0.24 to 0.33)."""

# What changes nothing: of top_k, every number that is not above 0.
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (0.0, -1.0),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
}


def _number(sampling: Mapping[str, Any], name: str, default: float) -> float:
    value = sampling.get(name)
    return default if value is None else float(value)


def fit(
    samples: Iterable[Sample], longest: int | None, overlong: Overlong
) -> tuple[list[Sample], Counter[str]]:
    """Samples that are no longer than allowed.

    Args:
        samples: of a trajectory.
        longest: most ids of prompt and completion together; None: any number.
        overlong: what happens to longer ones. ``truncate`` keeps what fits of the completion, so that the
            rest of it is not trained; a prompt that fills the room by itself leaves nothing, and is dropped.

    Returns:
        Samples, and how many were left out, by reason.

    Raises:
        ConfigError: one is longer, and ``overlong`` is ``error``.
    """
    fitting: list[Sample] = []
    left_out: Counter[str] = Counter()
    for sample in samples:
        tokens = len(sample.prompt) + len(sample.completion)
        if longest is None or tokens <= longest:
            fitting.append(sample)
        elif overlong == "error":
            raise ConfigError(
                f"step {sample.step} has {tokens} tokens, more than {longest}: choose TrainConfig.overlong "
                "('drop' or 'truncate'), or lower max_model_len where it is served"
            )
        elif overlong == "truncate" and (room := longest - len(sample.prompt)) > 0:
            fitting.append(
                replace(sample, completion=sample.completion[:room], logprobs=sample.logprobs[:room])
            )
        else:
            left_out[OVERLONG] += 1
    return fitting, left_out


def canonical(samples: Iterable[Sample]) -> list[Sample]:
    """Samples in an order that depends on what they hold, not on how they came.

    Lexicographic by ids, so that neighbours share the longest prefixes. Ids of steps decide last: they
    are random, and samples equal in everything else are interchangeable.
    """

    def key(s: Sample) -> tuple[bytes, int, float, tuple[float, ...], float, str]:
        known = tuple(1.0 if p is None else p for p in s.logprobs)
        return s.packed, len(s.prompt), s.advantage, known, s.temperature, s.step

    return sorted(samples, key=key)


def fork_rate(samples: Sequence[Sample]) -> float:
    """Rows that a trajectory needs beyond its first, on average.

    0 when each step's prompt continues what came before it; each place where the history was changed
    (stripped thinking, trimming, a branch, another agent's prompt) adds one.
    """
    by_rollout: dict[str, list[bytes]] = {}
    for sample in samples:
        by_rollout.setdefault(sample.rollout, []).append(sample.packed)
    extra = 0
    for rows in by_rollout.values():
        rows.sort()
        # In this order a row that another one continues is continued by the next one.
        extra += sum(1 for row, after in pairwise(rows) if not after.startswith(row))
    return extra / len(by_rollout) if by_rollout else 0.0
