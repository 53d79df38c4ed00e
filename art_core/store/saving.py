"""Saving trajectories and groups that may be new, partly recorded, or recorded and scored since; and scores.

Invariant: afterwards the store holds what was given, and nothing that it knew is lost: steps and spans
are only added, a replaced reward stays in the history, and no reward is replaced by none.
"""

import time

from sqlalchemy import Connection, insert, select, update

from art_core.errors import RewardError
from art_core.store import codec
from art_core.store.packing import clean_text
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


def save_group(connection: Connection, group: TrajectoryGroup, group_id: str, run_id: str | None) -> str:
    """Write a group and return its id."""
    scenario = codec.scenario_row(group.scenario)
    insert_scenario(connection, scenario)
    insert_group(connection, group_id, run_id, scenario)
    for position, member in enumerate(group.trajectories):
        save_trajectory(connection, member, run_id)
        connection.execute(
            update(trajectories)
            .where(trajectories.c.id == member.id)
            .values(group_id=group_id, group_position=position)
        )
    return group_id


def save_trajectory(connection: Connection, member: Trajectory, run_id: str | None) -> None:
    """Write a trajectory, or what is new about it."""
    found = connection.execute(select(trajectories.c.reward).where(trajectories.c.id == member.id)).first()
    if found is None:
        scenario = codec.scenario_row(member.scenario)
        insert_trajectory(connection, codec.trajectory_row(member, scenario["digest"], run_id), scenario)
        known: set[str] = set()
    else:
        row = codec.outcome_row(member)
        if member.reward is None and not member.failed:
            # Someone may have scored it since; not knowing a reward does not take it away.
            del row["reward"], row["components"]
        connection.execute(update(trajectories).where(trajectories.c.id == member.id).values(row))
        known = set(connection.scalars(select(steps.c.id).where(steps.c.rollout_id == member.id)))
    if missing := [codec.encode_step(step) for step in member.steps if step.id not in known]:
        insert_steps(connection, missing)
    if member.spans:
        traced = {span.id for span in read_spans(connection, [member.id])[member.id]}
        if new := [span for span in member.spans if span.id not in traced]:
            insert_spans(connection, member.id, codec.encode_spans(new))
    if found is None or (member.reward is not None and found.reward != member.reward):
        insert_reward(connection, member, ROLLOUT)


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
