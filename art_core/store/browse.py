"""Lists for people who look through a store: trajectories, groups and runs, filtered and page by page.

Invariant: a list costs the rows that it shows, not those that the store holds: no step, prompt or token is
decoded for it, and the next page begins where this one ended, whatever was recorded meanwhile.

A filter becomes conditions on indexed columns; one query finds a page of rows; a few more, over the ids of
that page alone, say what else a reader wants to know of them (steps, nodes, rewards of members).
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, exists, func, or_, select, true

from art_core.errors import ConfigError, UnknownTrajectoryError
from art_core.store.packing import to_json
from art_core.store.reading import read_runs
from art_core.store.records import Run
from art_core.store.rows import (
    NO_SPREAD,
    Choices,
    GroupRow,
    Order,
    Page,
    RunSummary,
    TrajectoryFilter,
    TrajectoryRow,
)
from art_core.store.schema import graphs, groups, metrics, scenarios, steps, trajectories
from art_core.store.store import Store
from art_core.types import RolloutStatus

__all__ = [
    "MOST",
    "Choices",
    "GroupRow",
    "Order",
    "Page",
    "RunSummary",
    "TrajectoryFilter",
    "TrajectoryRow",
    "choices",
    "count_trajectories",
    "graph_shapes",
    "list_groups",
    "list_trajectories",
    "run_summaries",
    "trajectory_row",
]

REWARD_MEAN = "reward_mean"
"""The metric that says whether a run learns."""

MOST = 500
"""Rows of one page at most."""

_SPARKS = 60


# -- trajectories ------------------------------------------------------------------------------------


def list_trajectories(
    store: Store, which: TrajectoryFilter, limit: int = 50, after: str | None = None
) -> Page[TrajectoryRow]:
    """A page of trajectories.

    Args:
        store: where they are.
        which: those that are wanted, and their order.
        limit: most rows, 1 to `MOST`.
        after: `Page.next` of the page before; None for the first.

    Raises:
        ConfigError: ``limit`` is out of range, or ``after`` is from no page of this list.
    """
    _check_limit(limit)
    by_reward = which.order in ("best", "worst")
    conditions = _conditions(which)
    if by_reward:
        conditions.append(trajectories.c.reward.is_not(None))
    keys = [trajectories.c.reward, trajectories.c.seq] if by_reward else [trajectories.c.seq]
    falls = which.order in ("newest", "best")
    if after is not None:
        conditions.append(_beyond(keys, _cursor(after, len(keys)), falls))
    query = (
        select(trajectories, scenarios.c.scenario_id)
        .join(scenarios, trajectories.c.scenario == scenarios.c.digest)
        .where(*conditions)
        .order_by(*(key.desc() if falls else key.asc() for key in keys))
        .limit(limit + 1)
    )
    with store.read() as connection:
        found = connection.execute(query).all()
        rows = found[:limit]
        called = _calls(connection, [row.id for row in rows])
    return Page(
        tuple(_trajectory_row(row, called[row.id]) for row in rows),
        _next([[row.reward, row.seq] if by_reward else [row.seq] for row in rows], len(found) > limit),
    )


def trajectory_row(store: Store, trajectory_id: str) -> TrajectoryRow:
    """What a list says of one trajectory.

    Raises:
        UnknownTrajectoryError: there is none with this id.
    """
    query = (
        select(trajectories, scenarios.c.scenario_id)
        .join(scenarios, trajectories.c.scenario == scenarios.c.digest)
        .where(trajectories.c.id == trajectory_id)
    )
    with store.read() as connection:
        row = connection.execute(query).first()
        if row is None:
            raise UnknownTrajectoryError(f"{store.location} has no trajectory {trajectory_id}")
        return _trajectory_row(row, _calls(connection, [row.id])[row.id])


def graph_shapes(store: Store, run_id: str | None) -> list[dict[str, Any]]:
    """The shapes of the graphs that a run's rollouts ran (None: those of no run), oldest first.

    They are as `art_core.sinks.GraphSink` says.
    """
    query = select(graphs.c.body).where(graphs.c.run_id.is_not_distinct_from(run_id)).order_by(graphs.c.seq)
    with store.read() as connection:
        return [json.loads(body) for body in connection.scalars(query)]


def count_trajectories(store: Store, which: TrajectoryFilter) -> int:
    """How many trajectories a filter lets through."""
    query = select(func.count()).select_from(trajectories).where(*_conditions(which))
    with store.read() as connection:
        return connection.scalar(query) or 0


def choices(store: Store, run_id: str | None = None) -> Choices:
    """What the trajectories of a run, or of all, can be filtered by."""
    of_run = true() if run_id is None else trajectories.c.run_id == run_id
    failures = select(func.substr(trajectories.c.failure, 1, _CAUSE_FITS)).where(
        of_run, trajectories.c.status == RolloutStatus.FAILED.value, trajectories.c.failure.is_not(None)
    )
    numbers = select(trajectories.c.policy_number).where(of_run, trajectories.c.policy_number.is_not(None))
    nodes = select(steps.c.node).where(steps.c.node.is_not(None))
    if run_id is not None:
        nodes = nodes.join(trajectories, steps.c.rollout_id == trajectories.c.id).where(of_run)
    with store.read() as connection:
        return Choices(
            policy_numbers=tuple(sorted(connection.scalars(numbers.distinct()))),
            nodes=tuple(sorted(connection.scalars(nodes.distinct()))),
            causes=tuple(sorted(set(filter(None, map(_cause, connection.scalars(failures.distinct())))))),
        )


def _conditions(which: TrajectoryFilter) -> list[ColumnElement[bool]]:
    of = trajectories.c
    equal = {
        of.run_id: which.run_id,
        of.policy_number: which.policy_number,
        of.status: which.status,
        of.group_id: which.group_id,
    }
    found: list[ColumnElement[bool]] = [
        column == value for column, value in equal.items() if value is not None
    ]
    if which.scenario_id is not None:
        digests = select(scenarios.c.digest).where(scenarios.c.scenario_id == which.scenario_id)
        found.append(of.scenario.in_(digests))
    if which.node is not None:
        found.append(exists().where(steps.c.rollout_id == of.id, steps.c.node == which.node))
    if which.cause is not None:
        found += [of.status == RolloutStatus.FAILED.value, _of_cause(which.cause)]
    if which.reward_min is not None:
        found.append(of.reward >= which.reward_min)
    if which.reward_max is not None:
        found.append(of.reward <= which.reward_max)
    return found


# The cause comes first in a failure's JSON (see `codec`); databases differ in how they would read JSON.
_BEFORE_CAUSE = '{"cause":'
_CAUSE_FITS = 200  # characters


def _of_cause(cause: str) -> ColumnElement[bool]:
    begin = f"{_BEFORE_CAUSE}{to_json(cause)},"
    return func.substr(trajectories.c.failure, 1, len(begin)) == begin


def _cause(failure: str) -> str | None:
    """The cause that a failure's JSON begins with; None where it is too long to be a cause's name."""
    try:
        return json.JSONDecoder().raw_decode(failure, len(_BEFORE_CAUSE))[0]
    except json.JSONDecodeError:
        return None


def _calls(connection: Connection, ids: Sequence[str]) -> defaultdict[str, dict[str | None, int]]:
    """Calls by trajectory and node."""
    called: defaultdict[str, dict[str | None, int]] = defaultdict(dict)
    query = (
        select(steps.c.rollout_id, steps.c.node, func.count().label("calls"))
        .where(steps.c.rollout_id.in_(ids))
        .group_by(steps.c.rollout_id, steps.c.node)
    )
    for row in connection.execute(query):
        called[row.rollout_id][row.node] = row.calls
    return called


def _trajectory_row(row: Any, called: dict[str | None, int]) -> TrajectoryRow:
    failure = {} if row.failure is None else json.loads(row.failure)
    return TrajectoryRow(
        id=row.id,
        run_id=row.run_id,
        group_id=row.group_id,
        scenario_id=row.scenario_id,
        status=RolloutStatus(row.status),
        cause=failure.get("cause"),
        failure=failure.get("message"),
        reward=row.reward,
        components=json.loads(row.components),
        policy_number=row.policy_number,
        started_at=row.started_at,
        duration=row.duration,
        steps=sum(called.values()),
        nodes=tuple(sorted(node for node in called if node is not None)),
    )


# -- groups ------------------------------------------------------------------------------------------


def list_groups(
    store: Store,
    run_id: str | None = None,
    policy_number: int | None = None,
    limit: int = 50,
    after: str | None = None,
    *,
    scenario_id: str | None = None,
    member: TrajectoryFilter | None = None,
    flat: bool | None = None,
) -> Page[GroupRow]:
    """A page of groups, newest first.

    Args:
        store: where they are.
        run_id: of this run; None: of all.
        policy_number: groups in which this policy version sampled.
        limit: most rows, 1 to `MOST`.
        after: `Page.next` of the page before; None for the first.
        scenario_id: of this scenario.
        member: groups that have one like this; its order does not count.
        flat: those that teach nothing (`GroupRow.flat`), or those that are not so; None: both.

    Raises:
        ConfigError: ``limit`` is out of range, or ``after`` is from no page of this list.
    """
    _check_limit(limit)
    of_group = trajectories.c.group_id == groups.c.id
    conditions: list[ColumnElement[bool]] = []
    if member is not None and (wanted := _conditions(member)):
        conditions.append(exists().where(of_group, *wanted))
    if flat is not None:
        got = trajectories.c.reward
        spread = select(func.max(got) - func.min(got)).where(of_group).scalar_subquery()
        several = select(func.count(got)).where(of_group).scalar_subquery() > 1
        conditions += [several, spread <= NO_SPREAD if flat else spread > NO_SPREAD]
    if run_id is not None:
        conditions.append(groups.c.run_id == run_id)
    if scenario_id is not None:
        digests = select(scenarios.c.digest).where(scenarios.c.scenario_id == scenario_id)
        conditions.append(groups.c.scenario.in_(digests))
    if policy_number is not None:
        sampled = select(trajectories.c.group_id).where(trajectories.c.policy_number == policy_number)
        if run_id is not None:
            sampled = sampled.where(trajectories.c.run_id == run_id)
        conditions.append(groups.c.id.in_(sampled))
    if after is not None:
        conditions.append(groups.c.seq < _cursor(after, 1)[0])
    query = (
        select(groups, scenarios.c.scenario_id)
        .join(scenarios, groups.c.scenario == scenarios.c.digest)
        .where(*conditions)
        .order_by(groups.c.seq.desc())
        .limit(limit + 1)
    )
    with store.read() as connection:
        found = connection.execute(query).all()
        rows = found[:limit]
        by_group: defaultdict[str, list[Any]] = defaultdict(list)
        columns = (
            getattr(trajectories.c, name) for name in ("group_id", "status", "reward", "policy_number")
        )
        for one in connection.execute(
            select(*columns)
            .where(trajectories.c.group_id.in_([row.id for row in rows]))
            .order_by(trajectories.c.group_position.asc().nulls_last(), trajectories.c.seq)
        ):
            by_group[one.group_id].append(one)
    return Page(
        tuple(_group_row(row, by_group[row.id]) for row in rows),
        _next([[row.seq] for row in rows], len(found) > limit),
    )


def _group_row(row: Any, members: Sequence[Any]) -> GroupRow:
    numbers = [m.policy_number for m in members if m.policy_number is not None]
    return GroupRow(
        id=row.id,
        run_id=row.run_id,
        scenario_id=row.scenario_id,
        created_at=row.created_at,
        size=len(members),
        failed=sum(m.status == RolloutStatus.FAILED for m in members),
        rewards=tuple(m.reward for m in members if m.reward is not None),
        policy_numbers=(min(numbers), max(numbers)) if numbers else None,
    )


# -- runs --------------------------------------------------------------------------------------------


def run_summaries(store: Store) -> list[RunSummary]:
    """All runs, newest first, with what tells whether they learn."""
    named = metrics.c.name == REWARD_MEAN
    last = (
        select(metrics.c.run_id, func.max(metrics.c.step).label("step"))
        .where(named)
        .group_by(metrics.c.run_id)
        .subquery()
    )
    # Of long runs, about _SPARKS evenly spaced values, and always the last one.
    shown = or_(metrics.c.step % (1 + last.c.step // _SPARKS) == 0, metrics.c.step == last.c.step)
    rewards = (
        select(metrics.c.run_id, metrics.c.step, metrics.c.value)
        .join(last, metrics.c.run_id == last.c.run_id)
        .where(named, shown)
        .order_by(metrics.c.run_id, metrics.c.step)
    )
    counts = select(trajectories.c.run_id, func.count().label("made")).group_by(trajectories.c.run_id)
    values: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    with store.read() as connection:
        known = read_runs(connection)
        for row in connection.execute(rewards):
            values[row.run_id].append((row.step, math.nan if row.value is None else row.value))
        made = {row.run_id: row.made for row in connection.execute(counts)}
    return [_summary(run, values[run.id], made.get(run.id, 0)) for run in reversed(known)]


def _summary(run: Run, rewards: Sequence[tuple[int, float]], made: int) -> RunSummary:
    return RunSummary(
        run=run,
        steps=rewards[-1][0] if rewards else 0,
        trajectories=made,
        reward_mean=rewards[-1][1] if rewards else None,
        sparkline=tuple(value for _, value in rewards),
    )


# -- pages -------------------------------------------------------------------------------------------


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= MOST:
        raise ConfigError(f"limit={limit}: expected 1 to {MOST}")


def _beyond(keys: Sequence[ColumnElement[Any]], last: Sequence[Any], falls: bool) -> ColumnElement[bool]:
    """What comes after a row in the order of its keys."""
    if len(keys) == 1:
        return keys[0] < last[0] if falls else keys[0] > last[0]
    first, second = keys
    tied = second < last[1] if falls else second > last[1]
    further = first <= last[0] if falls else first >= last[0]
    return and_(further, or_(first != last[0], tied))


def _next(keys: Sequence[Sequence[Any]], more: bool) -> str | None:
    return "~".join(repr(key) for key in keys[-1]) if more else None


def _cursor(after: str, parts: int) -> list[Any]:
    found = after.split("~")
    try:
        if len(found) == parts:
            return [*map(float, found[:-1]), int(found[-1])]
    except ValueError:
        pass
    raise ConfigError(f"there is no page after {after!r}; begin at the first one, without 'after'")
