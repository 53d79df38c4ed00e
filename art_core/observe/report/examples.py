"""What a report shows of a run's trajectories: scenarios before and after, the best and the worst.

Invariant: "before" and "after" are the first and the last policy version that met a scenario, and what is
shown of each is a rollout of about the mean reward there, not the luckiest one.
"""

from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import func, select

from art_core.store import Store
from art_core.store.browse import TrajectoryFilter, list_trajectories
from art_core.store.records import Score
from art_core.store.schema import scenarios, trajectories
from art_core.types import Trajectory

_TO_CHOOSE_FROM = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """How one policy version did on one scenario.

    Attributes:
        number: of the version.
        mean: reward, over its scored rollouts.
        typical: a rollout of about that reward.
        scores: its reward history, oldest first.
    """

    number: int
    mean: float
    typical: Trajectory
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One scenario, before and after."""

    scenario_id: str
    before: Met
    after: Met


@dataclass(frozen=True, slots=True, kw_only=True)
class Extremes:
    """The best and the worst trajectory of one version."""

    number: int
    best: Trajectory
    worst: Trajectory


def changes(store: Store, run_id: str, most: int) -> list[Change]:
    """At most ``most`` scenarios that several versions met; those met furthest apart come first."""
    if not most:
        return []
    means = _means(store, run_id)
    ends = {scenario: (min(of), max(of)) for scenario, of in means.items() if len(of) > 1}

    def telling(scenario: str) -> tuple[int, float]:
        first, last = ends[scenario]
        return last - first, abs(means[scenario][last] - means[scenario][first])

    return [
        Change(
            scenario_id=scenario,
            before=_met(store, run_id, scenario, ends[scenario][0], means[scenario]),
            after=_met(store, run_id, scenario, ends[scenario][1], means[scenario]),
        )
        for scenario in sorted(ends, key=telling, reverse=True)[:most]
    ]


def extremes(store: Store, run_id: str) -> list[Extremes]:
    """The best and the worst trajectory of the first and of the last version that has scored ones."""
    of = trajectories.c
    bounds = select(func.min(of.policy_number), func.max(of.policy_number))
    with store.read() as connection:
        first, last = connection.execute(bounds.where(of.run_id == run_id, of.reward.is_not(None))).one()
    found: list[Extremes] = []
    for number in dict.fromkeys(n for n in (first, last) if n is not None):
        ends = [
            list_trajectories(
                store, TrajectoryFilter(run_id=run_id, policy_number=number, order=order), limit=1
            )
            for order in ("best", "worst")
        ]
        best, worst = (store.trajectory(page.items[0].id) for page in ends)
        found.append(Extremes(number=number, best=best, worst=worst))
    return found


def _means(store: Store, run_id: str) -> dict[str, dict[int, float]]:
    """Mean rewards by scenario and version."""
    of = trajectories.c
    query = (
        select(scenarios.c.scenario_id, of.policy_number, func.avg(of.reward))
        .join(scenarios, of.scenario == scenarios.c.digest)
        .where(of.run_id == run_id, of.reward.is_not(None), of.policy_number.is_not(None))
        .group_by(scenarios.c.scenario_id, of.policy_number)
    )
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    with store.read() as connection:
        for scenario, number, mean in connection.execute(query):
            found[scenario][number] = float(mean)
    return found


def _met(store: Store, run_id: str, scenario: str, number: int, means: dict[int, float]) -> Met:
    which = TrajectoryFilter(run_id=run_id, scenario_id=scenario, policy_number=number, order="best")
    rows = list_trajectories(store, which, limit=_TO_CHOOSE_FROM).items
    mean = means[number]
    typical = min(rows, key=lambda row: abs((row.reward or 0.0) - mean))
    return Met(
        number=number,
        mean=mean,
        typical=store.trajectory(typical.id),
        scores=tuple(store.scores(typical.id)),
    )
