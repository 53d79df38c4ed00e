"""Rewards that the environment gives: a value of the agent's final state, or one that the rollout measured.

Invariant: a value that is not there is an error; a run whose outcome nobody knows is not a lost one.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

from art_core.errors import RewardError
from art_core.rewards.compose import Measure
from art_core.types import Trajectory


@dataclass(frozen=True, slots=True)
class Outcome(Measure):
    """A number or truth value of the state that a graph returned, else of the rollout's metrics.

    ``Outcome("won")`` is 1.0 where the graph's state says ``won=True``.

    Attributes:
        key: of the state, or of ``trajectory.metrics``.
    """

    key: str
    _: KW_ONLY
    name: str = "outcome"

    def value(self, trajectory: Trajectory, output: object = None) -> float:
        """The number; true is 1.0, false 0.0."""
        state = cast("Mapping[str, Any]", output) if isinstance(output, Mapping) else {}
        for place in (state, trajectory.metrics):
            if self.key in place:
                return self._number(place[self.key], trajectory)
        known = ", ".join(map(repr, sorted({*map(str, state), *trajectory.metrics}))) or "nothing"
        raise RewardError(
            f"reward {self.name!r}: neither the output nor the metrics of trajectory {trajectory.id} "
            f"have {self.key!r} (they have: {known})"
        )

    def _number(self, value: Any, trajectory: Trajectory) -> float:
        if isinstance(value, bool | int | float):
            return float(value)
        raise RewardError(
            f"reward {self.name!r}: {self.key!r} of trajectory {trajectory.id} is {value!r}; "
            "expected a number or a truth value"
        )
