"""Adaptive weights: components divided by their running spread, so that none drowns the others.

Invariant: all members of a group are scored on one scale, the one that was known when the group's first
member was scored; otherwise two equal rollouts would get different rewards.

Data flow: raw values of every scored trajectory -> exponentially weighted mean and variance of each
component -> weight / standard deviation.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

from art_core.errors import ConfigError
from art_core.rewards.compose import Component, Composed
from art_core.rewards.sums import SCALE, combined
from art_core.scoring import Reward
from art_core.types import Trajectory

KEPT_GROUPS = 4096
"""How many groups' scales are remembered; more groups than that are never under way at once."""

NO_SPREAD = 1e-9
"""A component that has varied by no more than this is left unscaled; it is float noise."""


@dataclass(frozen=True, slots=True)
class RunningSpread:
    """Exponentially weighted mean and variance.

    Finch 2009, "Incremental calculation of weighted mean and variance", section 9.

    Attributes:
        count: values seen.
        mean: of them.
        variance: of them, biased.
    """

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def seen(self, value: float, window: int) -> "RunningSpread":
        """With one more value; a plain average until there are ``window`` of them."""
        share = 1 / min(self.count + 1, window)
        off = value - self.mean
        return RunningSpread(
            self.count + 1,
            self.mean + share * off,
            (1 - share) * (self.variance + share * off * off),
        )

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.variance)


@dataclass(frozen=True, slots=True, init=False)
class Adaptive(Component):
    """A sum whose weights are divided by each component's running spread.

    ``Adaptive(0.7 * quality - 0.3 * Latency())`` weighs 0.7 to 0.3 in standard deviations, whatever the
    units. The weight that was used is recorded like any other, and beside it the deviation that it was
    divided by. It has a memory, so it runs in one process: with workers, use fixed weights. `spreads` and
    ``known`` carry the memory over a restart.

    Attributes:
        total: the sum.
        warmup: values of a component that are seen before it is scaled.
        window: over how many values the spread is taken, about.

    Raises:
        ConfigError: a number is out of range.
    """

    total: Composed
    warmup: int
    window: int
    _spreads: dict[str, RunningSpread] = field(repr=False, compare=False)
    _scales: OrderedDict[str, Mapping[str, float]] = field(repr=False, compare=False)
    _changing: threading.Lock = field(repr=False, compare=False)

    def __init__(
        self,
        total: Component,
        *,
        warmup: int = 32,
        window: int = 512,
        known: Mapping[str, RunningSpread] | None = None,
        name: str = "",
    ) -> None:
        for what, value, least in (("warmup", warmup, 2), ("window", window, 2)):
            if value < least:
                raise ConfigError(f"{what}={value}: expected at least {least}")
        for attribute, value in (
            ("total", total if isinstance(total, Composed) else 1.0 * total),
            ("warmup", warmup),
            ("window", window),
            ("name", name),
            ("_spreads", dict(known or {})),
            ("_scales", OrderedDict[str, Mapping[str, float]]()),
            ("_changing", threading.Lock()),
        ):
            object.__setattr__(self, attribute, value)

    @property
    def spreads(self) -> dict[str, RunningSpread]:
        """What has been seen of each component so far."""
        with self._changing:
            return dict(self._spreads)

    async def __call__(self, trajectory: Trajectory, output: object = None) -> Reward:
        """The sum, on the scale of the trajectory's group."""
        parts = await self.total.parts(trajectory, output)
        with self._changing:
            scales = self._scales_of(trajectory.group_id)
            for name, part in parts.items():
                spread = self._spreads.get(name, RunningSpread())
                self._spreads[name] = spread.seen(part.total, self.window)
        weights = {name: weight / scales[name] for name, weight in self.total.weights.items()}
        found = combined(parts, weights, trajectory, events=self.total.events)
        scaled = {f"{SCALE}{name}": scale for name, scale in scales.items() if scale != 1.0}
        return replace(found, metrics={**found.metrics, **scaled})

    def _scales_of(self, group_id: str | None) -> Mapping[str, float]:
        known = None if group_id is None else self._scales.get(group_id)
        if known is not None:
            return known
        scales = {name: self._scale(name) for name in self.total.weights}
        if group_id is not None:
            self._scales[group_id] = scales
            while len(self._scales) > KEPT_GROUPS:
                self._scales.popitem(last=False)
        return scales

    def _scale(self, name: str) -> float:
        spread = self._spreads.get(name, RunningSpread())
        ready = spread.count >= self.warmup and spread.deviation > NO_SPREAD
        return spread.deviation if ready else 1.0

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "an Adaptive reward has a memory that processes cannot share; gather without workers, "
            "or use fixed weights"
        )
