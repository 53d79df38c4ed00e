"""One scenario over time: what each policy version made of it.

Invariant: every rollout of the scenario is counted under exactly one version, however many there are, and no
step is read for it.
"""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, case, func, select

from art_core.store.schema import scenarios, trajectories
from art_core.store.store import Store
from art_core.types import RolloutStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """A policy version's rollouts of a scenario.

    Attributes:
        number: of the version; None for rollouts in which no policy answered.
        size: how many there are.
        failed: how many of them failed.
        scored: how many have a reward.
        mean: of the rewards; None without any.
        least: of the rewards.
        greatest: of the rewards.
    """

    number: int | None
    size: int
    failed: int
    scored: int
    mean: float | None
    least: float | None
    greatest: float | None


def scenario_versions(store: Store, scenario_id: str, run_id: str | None = None) -> list[VersionRow]:
    """The policy versions that met a scenario, in the order of their numbers; none first.

    Args:
        store: where they are.
        scenario_id: which scenario.
        run_id: of this run; None: of all.
    """
    of = trajectories.c
    failed = case((of.status == RolloutStatus.FAILED.value, 1), else_=0)
    query = (
        select(
            of.policy_number.label("number"),
            func.count().label("size"),
            func.sum(failed).label("failed"),
            func.count(of.reward).label("scored"),
            func.avg(of.reward).label("mean"),
            func.min(of.reward).label("least"),
            func.max(of.reward).label("greatest"),
        )
        .where(*_conditions(scenario_id, run_id))
        .group_by(of.policy_number)
    )
    with store.read() as connection:
        rows = connection.execute(query).mappings().all()
    found = [VersionRow(**dict(row)) for row in rows]
    return sorted(found, key=lambda row: -1 if row.number is None else row.number)


def middle_rollouts(store: Store, scenario_id: str, run_id: str | None = None) -> dict[int | None, str]:
    """By policy version: the id of the rollout in the middle by reward, or of the first if none has one."""
    of = trajectories.c
    place = func.row_number().over(
        partition_by=of.policy_number, order_by=(of.reward.is_(None), of.reward, of.seq)
    )
    scored = func.count(of.reward).over(partition_by=of.policy_number)
    ranked = (
        select(of.id, of.policy_number, place.label("place"), scored.label("scored"))
        .where(*_conditions(scenario_id, run_id))
        .subquery()
    )
    middle = select(ranked.c.policy_number, ranked.c.id).where(ranked.c.place == ranked.c.scored // 2 + 1)
    with store.read() as connection:
        return {row.policy_number: row.id for row in connection.execute(middle)}


def _conditions(scenario_id: str, run_id: str | None) -> list[ColumnElement[bool]]:
    digests = select(scenarios.c.digest).where(scenarios.c.scenario_id == scenario_id)
    found: list[ColumnElement[bool]] = [trajectories.c.scenario.in_(digests)]
    return found if run_id is None else [*found, trajectories.c.run_id == run_id]
