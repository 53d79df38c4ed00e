"""Parts of what the store holds of rollouts, for those who look and need no more than that.

Invariant: a part equals what the whole would say of it, and is read without decoding the rest.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select

from art_core.errors import UnknownTrajectoryError
from art_core.store.codec import StepReader, scenario_from_body, trajectory_from_row
from art_core.store.contents import read_contents, split
from art_core.store.packing import unpack
from art_core.store.schema import groups, scenarios, steps, trajectories
from art_core.store.store import Store
from art_core.types import Scenario, Step, StepTokens, TrajectoryGroup

TokenBytes = tuple[bytes, bytes]
"""Prompt and completion of a step: ids as little-endian int32."""


def read_step(store: Store, trajectory_id: str, step_id: str) -> Step:
    """One step of a trajectory, without the others.

    Raises:
        UnknownTrajectoryError: the trajectory has no such step.
    """
    query = select(steps).where(steps.c.id == step_id, steps.c.rollout_id == trajectory_id)
    with store.read() as connection:
        row = connection.execute(query).first()
        if row is None:
            raise UnknownTrajectoryError(f"trajectory {trajectory_id} has no step {step_id}")
        return StepReader(read_contents(connection, StepReader.digests(row))).step(row)


def group_without_tokens(store: Store, group_id: str) -> TrajectoryGroup:
    """A group with its members and their steps, but without tokens and spans.

    Raises:
        UnknownTrajectoryError: there is no such group.
    """
    query = (
        select(trajectories, scenarios.c.body)
        .join(scenarios, trajectories.c.scenario == scenarios.c.digest)
        .where(trajectories.c.group_id == group_id)
        .order_by(*_ORDER)
    )
    with store.read() as connection:
        scenario = _scenario_of(store, connection, group_id)
        members = connection.execute(query).all()
        made = _steps_of_group(connection, group_id)
        rows = [row for rows in made.values() for row in rows]
        pieces = read_contents(
            connection, (d for row in rows for d in split(row.messages) + split(row.tools))
        )
    reader = _WithoutTokens(pieces)
    found = [
        trajectory_from_row(m, scenario_from_body(m.body), [reader.step(row) for row in made[m.id]])
        for m in members
    ]
    return TrajectoryGroup(scenario, tuple(found), group_id)


def group_tokens(store: Store, group_id: str) -> list[list[TokenBytes | None]]:
    """By member of a group, in its order: the tokens of each of its steps; None for a step without any.

    Raises:
        UnknownTrajectoryError: there is no such group.
    """
    members = member_ids(store, group_id)
    with store.read() as connection:
        made = _steps_of_group(connection, group_id)
        pieces = read_contents(
            connection, (d for rows in made.values() for row in rows for d in split(row.prompt_blocks or b""))
        )
    return [[_tokens(row, pieces) for row in made[member]] for member in members]


def member_ids(store: Store, group_id: str) -> list[str]:
    """The ids of a group's members, in its order.

    Raises:
        UnknownTrajectoryError: there is no such group.
    """
    order = select(trajectories.c.id).where(trajectories.c.group_id == group_id).order_by(*_ORDER)
    with store.read() as connection:
        _scenario_of(store, connection, group_id)
        return list(connection.scalars(order))


def group_size(store: Store, group_id: str) -> tuple[int, int]:
    """How many steps a group's members have, and the number of the last one: it changes with every step."""
    query = (
        select(func.count(), func.max(steps.c.seq))
        .select_from(steps.join(trajectories, steps.c.rollout_id == trajectories.c.id))
        .where(trajectories.c.group_id == group_id)
    )
    with store.read() as connection:
        count, last = connection.execute(query).one()
    return count, last or 0


_ORDER: tuple[ColumnElement[Any], ...] = (
    trajectories.c.group_position.asc().nulls_last(),
    trajectories.c.seq,
)


class _WithoutTokens(StepReader):
    def _tokens(self, row: Any) -> StepTokens | None:
        return None


def _scenario_of(store: Store, connection: Connection, group_id: str) -> Scenario:
    joined = groups.join(scenarios, groups.c.scenario == scenarios.c.digest)
    body = connection.scalar(select(scenarios.c.body).select_from(joined).where(groups.c.id == group_id))
    if body is None:
        raise UnknownTrajectoryError(f"{store.location} has no group {group_id}")
    return scenario_from_body(body)


def _steps_of_group(connection: Connection, group_id: str) -> defaultdict[str, list[Any]]:
    found: defaultdict[str, list[Any]] = defaultdict(list)
    query = (
        select(steps)
        .join(trajectories, steps.c.rollout_id == trajectories.c.id)
        .where(trajectories.c.group_id == group_id)
        .order_by(steps.c.started_at, steps.c.seq)
    )
    for row in connection.execute(query):
        found[row.rollout_id].append(row)
    return found


def _tokens(row: Any, pieces: dict[bytes, bytes]) -> TokenBytes | None:
    if row.prompt_tokens is None:
        return None
    blocks: Iterator[bytes] = (pieces[key] for key in split(row.prompt_blocks or b""))
    return b"".join((*blocks, unpack(row.prompt_tokens))), unpack(row.completion_tokens)
