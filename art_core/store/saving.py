"""Saving trajectories and groups that may be new, partly recorded, or recorded and scored since; and scores.

Invariant: afterwards the store holds what was given, and nothing that it knew is lost: steps and spans
are only added, a replaced reward stays in the history, and no reward is replaced by none.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from sqlalchemy import Connection, bindparam, insert, select, update

from art_core.errors import RewardError, StoreError
from art_core.store import codec
from art_core.store.packing import clean_text
from art_core.store.prepared import Prepared
from art_core.store.reading import read_spans
from art_core.store.schema import scores, steps, trajectories
from art_core.store.sink import (
    ROLLOUT,
    insert_group,
    insert_reward,
    insert_scenario,
    insert_spans,
    insert_steps,
    insert_trajectory,
    unknown,
)
from art_core.types import RolloutStatus, Trajectory, TrajectoryGroup

_UPDATE = Prepared(lambda _: update(trajectories).where(trajectories.c.id == bindparam("saved")))


def save_group(connection: Connection, group: TrajectoryGroup, group_id: str, run_id: str | None) -> None:
    """Write a group."""
    scenario = codec.scenario_row(group.scenario)
    insert_scenario(connection, scenario)
    insert_group(connection, group_id, run_id, scenario)
    save_trajectories(connection, group.trajectories, run_id)
    places = [
        {"saved": member.id, "group_id": group_id, "group_position": position}
        for position, member in enumerate(group.trajectories)
    ]
    if places:
        _UPDATE.execute(connection, places)


def save_trajectories(connection: Connection, members: Sequence[Trajectory], run_id: str | None) -> None:
    """Write trajectories, or what is new about them."""
    known = _Known.of(connection, members)
    for member in members:
        _save(connection, member, run_id, known)


@dataclass(frozen=True, slots=True)
class _Known:
    """What the store holds of some trajectories.

    Attributes:
        rewards: of those that it holds at all.
        steps: ids of their steps, by trajectory.
        spans: of those to be saved with spans, ids of theirs.
    """

    rewards: dict[str, float | None]
    steps: defaultdict[str, set[str]]
    spans: defaultdict[str, set[str]]

    @classmethod
    def of(cls, connection: Connection, members: Sequence[Trajectory]) -> Self:
        """Looked up together: a query costs more than what it finds."""
        t = trajectories.c
        rows = connection.execute(select(t.id, t.reward).where(t.id.in_([member.id for member in members])))
        known = cls({row.id: row.reward for row in rows}, defaultdict(set), defaultdict(set))
        recorded = select(steps.c.rollout_id, steps.c.id).where(steps.c.rollout_id.in_(known.rewards))
        for row in connection.execute(recorded):
            known.steps[row.rollout_id].add(row.id)
        if traced := [member.id for member in members if member.spans and member.id in known.rewards]:
            for rollout_id, spans in read_spans(connection, traced).items():
                known.spans[rollout_id].update(span.id for span in spans)
        return known


def _save(connection: Connection, member: Trajectory, run_id: str | None, known: _Known) -> None:
    is_new = member.id not in known.rewards
    if is_new:
        scenario = codec.scenario_row(member.scenario)
        insert_trajectory(connection, codec.trajectory_row(member, scenario["digest"], run_id), scenario)
    else:
        row = codec.outcome_row(member)
        if member.reward is None and not member.failed:
            # Someone may have scored it since; not knowing a reward does not take it away.
            del row["reward"], row["components"]
        _UPDATE.execute(connection, [row | {"saved": member.id}])
    recorded, traced = known.steps[member.id], known.spans[member.id]
    if missing := [step for step in member.steps if step.id not in recorded]:
        for step in missing:
            if step.rollout_id != member.id:
                raise StoreError(
                    f"step {step.id} of trajectory {member.id} says that it is of {step.rollout_id!r}; a "
                    "step belongs to one rollout: give it that one's id, as in "
                    "dataclasses.replace(step, rollout_id=trajectory.id)"
                )
        insert_steps(connection, [codec.encode_step(step) for step in missing])
        recorded.update(step.id for step in missing)
    if new := [span for span in member.spans if span.id not in traced]:
        insert_spans(connection, member.id, codec.encode_spans(new))
        traced.update(span.id for span in new)
    if is_new or (member.reward is not None and known.rewards[member.id] != member.reward):
        insert_reward(connection, member, ROLLOUT)
    if is_new or member.reward is not None or member.failed:
        known.rewards[member.id] = member.reward


def save_score(
    connection: Connection,
    trajectory_id: str,
    reward: float,
    components: str,
    *,
    author: str,
    explanation: str,
) -> None:
    """Give a recorded trajectory a reward, and its history a line.

    Args:
        connection: in a transaction.
        trajectory_id: whose reward it is.
        reward: a finite number.
        components: what it is made of, as JSON.
        author: who says so.
        explanation: why.

    Raises:
        RewardError: the rollout failed.
        UnknownTrajectoryError: there is no such trajectory.
    """
    query = select(trajectories.c.status, trajectories.c.failure).where(trajectories.c.id == trajectory_id)
    found = connection.execute(query).first()
    if found is None:
        raise unknown(trajectory_id, f"scoring trajectory {trajectory_id}")
    if found.status == RolloutStatus.FAILED:
        raise RewardError(
            f"trajectory {trajectory_id} failed ({found.failure}) and cannot have a reward: a failure is not "
            "a score"
        )
    values = {"reward": reward, "components": components}
    connection.execute(update(trajectories).where(trajectories.c.id == trajectory_id).values(values))
    connection.execute(
        insert(scores),
        values
        | {
            "trajectory_id": trajectory_id,
            "author": author,
            "explanation": clean_text(explanation),
            "created_at": time.time(),
        },
    )
