"""What lists of a store consist of: filters, pages, rows.

Invariant: a row holds what a list shows, never a step's messages or tokens.

`art_core.store.browse` makes them.
"""

import math
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

from art_core.errors import ConfigError
from art_core.store.records import Run
from art_core.types import RolloutStatus

T = TypeVar("T")

NO_SPREAD = 1e-6
"""Rewards that differ by no more than this are equal: training leaves their group out."""

Order = Literal["newest", "oldest", "best", "worst"]
"""By when they began, or by reward; ordered by reward, only those that have one are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFilter:
    """Which trajectories, and in which order; what is None does not narrow them down.

    Attributes:
        run_id: of this training run.
        policy_number: the newest policy version that answered in it, of the run's own model if it did, has
            this number.
        scenario_id: of this scenario.
        node: a call was made in a LangGraph node of this name.
        status: a `RolloutStatus`.
        cause: why it failed (`Failure.cause`).
        reward_min: its reward is at least this.
        reward_max: its reward is at most this.
        group_id: of this group.
        order: see `Order`.

    Raises:
        ConfigError: ``status`` or ``order`` is none that there is, or a bound is not a number.
    """

    run_id: str | None = None
    policy_number: int | None = None
    scenario_id: str | None = None
    node: str | None = None
    status: str | None = None
    cause: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    group_id: str | None = None
    order: Order = "newest"

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise ConfigError(f"order={self.order!r}: expected one of {', '.join(get_args(Order))}")
        if self.status is not None and self.status not in list(RolloutStatus):
            raise ConfigError(f"status={self.status!r}: expected one of {', '.join(RolloutStatus)}")
        for name in ("reward_min", "reward_max"):
            bound = getattr(self, name)
            if bound is not None and math.isnan(bound):
                raise ConfigError(f"{name} is not a number")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some rows of a list.

    Attributes:
        items: in the list's order.
        next: what to give as ``after`` for those that follow; None when there are none.
    """

    items: tuple[T, ...]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRow:
    """A trajectory in a list, without its steps.

    Attributes:
        failure: what a person needs to read when it failed; ``cause`` is the kind.
        components: named parts of the reward.
        policy_number: number of the newest version of the run's own model that answered, or else of any
            policy; None if none did.
        started_at: Unix time, seconds.
        duration: seconds; None while it runs.
        steps: how many LLM calls it made.
        nodes: LangGraph nodes that made them, by name.
    """

    id: str
    run_id: str | None
    group_id: str | None
    scenario_id: str
    status: RolloutStatus
    cause: str | None
    failure: str | None
    reward: float | None
    components: dict[str, float]
    policy_number: int | None
    started_at: float
    duration: float | None
    steps: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """A group in a list.

    Attributes:
        created_at: Unix time, seconds.
        size: members.
        failed: members without a reward because they failed.
        rewards: of its scored members, in the group's order.
        policy_numbers: the least and the greatest that sampled in it; None if none did.
    """

    id: str
    run_id: str | None
    scenario_id: str
    created_at: float
    size: int
    failed: int
    rewards: tuple[float, ...]
    policy_numbers: tuple[int, int] | None

    @property
    def reward_mean(self) -> float | None:
        """Mean reward of the scored members."""
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def spread(self) -> float | None:
        """Best reward minus worst."""
        return max(self.rewards) - min(self.rewards) if self.rewards else None

    @property
    def flat(self) -> bool:
        """Whether several members were scored, all the same: such a group teaches nothing."""
        return len(self.rewards) > 1 and max(self.rewards) - min(self.rewards) <= NO_SPREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in a list.

    Attributes:
        run: its record.
        steps: number of its last training step; 0 before the first.
        trajectories: how many were recorded.
        reward_mean: of its last step; None before it.
        sparkline: reward means, oldest first; of long runs about every so many steps.
    """

    run: Run
    steps: int
    trajectories: int
    reward_mean: float | None
    sparkline: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a filter may be set to, of one run or of all.

    Attributes:
        policy_numbers: ascending.
        nodes: LangGraph node names.
        causes: of failures.
    """

    policy_numbers: tuple[int, ...]
    nodes: tuple[str, ...]
    causes: tuple[str, ...]
