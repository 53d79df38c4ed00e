"""Marks: what changes when anything of a trajectory does, found without reading its steps.

Invariant: two marks of one trajectory are equal exactly when its outcome, rewards, steps, spans, scores and
feedback are what they were. Whoever keeps a copy elsewhere compares marks to see what to copy anew.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from sqlalchemy import Column, func, select

from art_core.store.schema import feedback, scores, spans, steps, trajectories
from art_core.store.store import Store
from art_core.types import RolloutStatus

_PAGE = 400  # trajectories in one transaction
_RECORDED = ("status", "faults", "failure", "duration", "group_id", "run_id")
_JUDGED = ("reward", "components", "step_rewards", "node_rewards", "metrics", "metadata")
"""What judges and people add to after the end; judges keep their words in the metadata."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The state of a trajectory.

    Attributes:
        trajectory_id: whose.
        run_id: the run that it belongs to, if any.
        ended: whether its rollout has.
        digest: 16 bytes that change with anything of it.
        recorded: 16 bytes that change with what was recorded of the rollout alone: not with rewards, metrics,
            metadata, scores and feedback, which may come long after its end.
        has_scores: whether it has a history of rewards.
        has_feedback: whether people said something of it.
    """

    trajectory_id: str
    run_id: str | None
    ended: bool
    digest: bytes
    recorded: bytes
    has_scores: bool
    has_feedback: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """How far a store has been looked at: the newest row of each table that says of a change."""

    trajectory: int = 0
    step: int = 0
    span: int = 0
    score: int = 0
    feedback: int = 0


def marks(
    store: Store, run_id: str | None = None, *, trajectory_ids: Sequence[str] | None = None
) -> Iterator[Mark]:
    """The marks of trajectories, in the order in which they began.

    Args:
        store: where they are.
        run_id: of this run only.
        trajectory_ids: of these only; those that the store lacks are passed over.
    """
    newest = {
        table.name: select(func.max(table.c.seq)).where(key == trajectories.c.id).scalar_subquery()
        for table, key in _PARTS
    }
    columns = [trajectories.c[name] for name in (*_RECORDED, *_JUDGED)]
    query = select(trajectories.c.seq, trajectories.c.id, *columns, *[q.label(n) for n, q in newest.items()])
    if run_id is not None:
        query = query.where(trajectories.c.run_id == run_id)
    wanted = None if trajectory_ids is None else list(dict.fromkeys(trajectory_ids))
    after = -1
    while True:
        page = query.where(trajectories.c.seq > after).order_by(trajectories.c.seq).limit(_PAGE)
        if wanted is not None:
            if not wanted:
                return
            chunk, wanted = wanted[:_PAGE], wanted[_PAGE:]
            page = query.where(trajectories.c.id.in_(chunk)).order_by(trajectories.c.seq)
        with store.read() as connection:
            rows = connection.execute(page).all()
        for row in rows:
            recorded = [getattr(row, name) for name in (*_RECORDED, steps.name, spans.name)]
            judged = [getattr(row, name) for name in (*_JUDGED, scores.name, feedback.name)]
            yield Mark(
                trajectory_id=row.id,
                run_id=row.run_id,
                ended=row.status != RolloutStatus.RUNNING.value,
                digest=_digest([*recorded, *judged]),
                recorded=_digest(recorded),
                has_scores=row.scores is not None,
                has_feedback=row.feedback is not None,
            )
        if wanted is None:
            if len(rows) < _PAGE:
                return
            after = rows[-1].seq


def _digest(state: Sequence[Any]) -> bytes:
    return blake2b(json.dumps(state).encode(), digest_size=16).digest()


def newest(store: Store) -> Seen:
    """How far a store can be looked at by now."""
    found: dict[str, int] = {}
    with store.read() as connection:
        for name, seq, _ in _SEEN:
            found[name] = connection.scalar(select(func.max(seq))) or 0
    return Seen(**found)


def changed(store: Store, seen: Seen, run_id: str | None = None) -> tuple[list[str], Seen]:
    """Which trajectories are new, or have something new, since the store was last looked at.

    That a rollout ended without leaving a span or a score shows in its mark alone; so whoever waits for ends
    keeps asking for the marks of those that had not ended.

    Args:
        store: where they are.
        seen: how far it had been looked at.
        run_id: of this run only.

    Returns:
        The trajectories' ids, and how far the store has been looked at now.
    """
    found: dict[str, None] = {}
    newest: dict[str, int] = {}
    with store.read() as connection:
        for name, seq, key in _SEEN:
            query = select(seq, key).where(seq > getattr(seen, name)).order_by(seq)
            if run_id is not None and name == "trajectory":
                query = query.where(trajectories.c.run_id == run_id)
            elif run_id is not None:
                query = query.join(trajectories, key == trajectories.c.id).where(
                    trajectories.c.run_id == run_id
                )
            newest[name] = getattr(seen, name)
            for row in connection.execute(query):
                found[row[1]] = None
                newest[name] = row[0]
    return list(found), Seen(**newest)


_PARTS = (
    (steps, steps.c.rollout_id),
    (spans, spans.c.rollout_id),
    (scores, scores.c.trajectory_id),
    (feedback, feedback.c.trajectory_id),
)
_SEEN: tuple[tuple[str, "Column[int]", "Column[str]"], ...] = (
    ("trajectory", trajectories.c.seq, trajectories.c.id),
    ("step", steps.c.seq, steps.c.rollout_id),
    ("span", spans.c.seq, spans.c.rollout_id),
    ("score", scores.c.seq, scores.c.trajectory_id),
    ("feedback", feedback.c.seq, feedback.c.trajectory_id),
)
