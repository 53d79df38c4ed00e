"""A canary: whether a version that came back is the one that left, told from the noise of its own kernels.

Invariant: everything here is computed from logprobs alone, and noise excuses no base model.

vLLM's LoRA kernels on CUDA add up in varying order (split-K with atomics): with random adapters on an H200
and vLLM 0.26, two canaries of one version, read one after the other, differed by 0.136 nats per token, while
those of another adapter and of the base model were equal. One that sleep had lost differed by 1.11, another
by 0.59. So a version is read several times before it sleeps, which makes its `Reference`: what it said, and
how much that varied. After it woke, each `Reading` is held against it and gives a `Check`; the `best` counts.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from art_core.types import PolicyVersion

TOLERANCE = 0.02
"""Mean absolute difference of logprobs, in nats per token, up to which a canary is what it was.

Above what bfloat16 kernels that add in another order make of the same weights, below half of what server and
trainer differ by with the same adapter (0.043 on an H200). It is all that a base model is allowed."""

READINGS = 3
"""Canaries of a version before it sleeps: the fewest whose median one that went astray cannot move."""

TRIES = 3
"""Canaries of a version after it woke, at most, before it counts as changed: noise passes, a loss stays."""

NOISE_FACTOR = 3.0
"""How many times its noise an adapter may differ by.

The noise is the largest of three differences, so one that is right seldom reaches twice that, and would have
to pass three times it in every try. Of the noise above it makes 0.41, which is less than both losses. (Noise
that comes and goes, shows in no reading before and in every try after, restarts a server for nothing.)"""

APART_FACTOR = 2.0
"""How many times its noise an adapter must differ from the base model by to be told from it.

A reading nearer to the base's than to its own is off by more than half of what lies between the two (triangle
inequality). From twice the noise on, that is more than the noise, and straight towards the base."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a canary said.

    Attributes:
        prefill: logprobs of the prompt's tokens but the first  [prompt_tokens - 1].
        decode: logprobs of a token beside the one that is forced, at each forced token: what the model
            thinks of one against the other, less a constant  [decoded_tokens].
    """

    prefill: tuple[float, ...]
    decode: tuple[float, ...]

    def difference(self, other: "Reading") -> float:
        """The larger of both mean absolute differences, in nats per token.

        Infinite for other lengths, and where a logprob is not a number.
        """
        return max(_mean_difference(self.prefill, other.prefill), _mean_difference(self.decode, other.decode))


@dataclass(frozen=True, slots=True)
class Check:
    """A version's reading, held against its reference.

    Attributes:
        version: which; 0 is the base model.
        difference: between the two, in nats per token.
        noise: by which its readings differed before, in nats per token.
        limit: up to which difference it is what it was, in nats per token.
        lost: whether it answers like the base model, which it did not before.
    """

    version: PolicyVersion
    difference: float
    noise: float
    limit: float
    lost: bool = False

    @property
    def changed(self) -> bool:
        """Whether it is not what it was."""
        return self.lost or self.difference > self.limit

    def __str__(self) -> str:
        like = ", like the base model now" if self.lost else ""
        return f"{self.version} (by {self.difference:.3g} nats per token, noise {self.noise:.3g}{like})"


@dataclass(frozen=True, slots=True)
class Reference:
    """What a version said before it slept.

    A loss goes unseen in an adapter that is apart from the base model neither by more than `limit` nor by
    more than `APART_FACTOR` times its noise; it changes little, or nothing that its noise does not.

    Attributes:
        version: which.
        reading: the median of its readings, token by token.
        noise: the largest difference between two of them, in nats per token.
        base: what the base model said; None for the base model.
    """

    version: PolicyVersion
    reading: Reading
    noise: float
    base: Reading | None = None

    @classmethod
    def of(
        cls, version: PolicyVersion, readings: Sequence[Reading], base: Reading | None = None
    ) -> "Reference":
        """The reference that one or more readings make."""
        pairs = [one.difference(other) for i, one in enumerate(readings) for other in readings[:i]]
        return cls(version, median(readings), max(pairs, default=0.0), base)

    @property
    def limit(self) -> float:
        """Up to which difference it is what it was, in nats per token."""
        if self.base is None or not math.isfinite(self.noise):  # a broken canary excuses nothing
            return TOLERANCE
        return max(TOLERANCE, NOISE_FACTOR * self.noise)

    @property
    def apart(self) -> float:
        """What lies between it and the base model, in nats per token."""
        return 0.0 if self.base is None else self.reading.difference(self.base)

    def check(self, reading: Reading) -> Check:
        """Hold a later reading against it."""
        difference = reading.difference(self.reading)
        lost = (
            self.base is not None
            and self.apart > max(TOLERANCE, APART_FACTOR * self.noise)
            and reading.difference(self.base) < difference
        )
        return Check(self.version, difference, self.noise, self.limit, lost)


def median(readings: Sequence[Reading]) -> Reading:
    """The median of each token's logprobs."""
    # Not strict: readings of unequal lengths make an infinite noise, which excuses nothing.
    return Reading(
        tuple(map(statistics.median, zip(*(r.prefill for r in readings), strict=False))),
        tuple(map(statistics.median, zip(*(r.decode for r in readings), strict=False))),
    )


def best(checks: Iterable[Check]) -> Check:
    """The one that says most for the version."""
    return min(checks, key=lambda check: (check.changed, check.difference))


def _mean_difference(some: Sequence[float], others: Sequence[float]) -> float:
    if len(some) != len(others) or not some:
        return math.inf
    mean = sum(abs(a - b) for a, b in zip(some, others, strict=True)) / len(some)
    return math.inf if math.isnan(mean) else mean
