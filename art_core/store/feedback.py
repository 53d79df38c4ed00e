"""What people said of trajectories.

Invariant: feedback is only added, and never changes a reward.
"""

import math
import time
from typing import Any, cast

from sqlalchemy import Connection, insert, select

from art_core.errors import RewardError
from art_core.store.packing import clean_text
from art_core.store.records import Feedback, FeedbackKind
from art_core.store.schema import feedback, trajectories
from art_core.store.sink import unknown

_ALLOWED = {
    FeedbackKind.THUMB: "1 (up) or -1 (down)",
    FeedbackKind.SCORE: "a number from 0 to 1",
    FeedbackKind.CHOICE: "1 (better) or 0.5 (a tie)",
}


def check_feedback(
    trajectory_id: str, kind: FeedbackKind | str, value: float, author: str, over: str | None
) -> dict[str, Any]:
    """A row of feedback.

    Raises:
        RewardError: kind, value, author or the other trajectory do not fit together; says how they would.
    """
    what = f"feedback on trajectory {trajectory_id}"
    try:
        kind = FeedbackKind(kind)
    except ValueError:
        kinds = ", ".join(FeedbackKind)
        raise RewardError(f"{what}: there is no kind {kind!r}; choose one of {kinds}") from None
    fits = (
        not isinstance(value, bool)
        and isinstance(cast(object, value), int | float)
        and math.isfinite(value)
        and {
            FeedbackKind.THUMB: value in (-1, 1),
            FeedbackKind.SCORE: 0 <= value <= 1,
            FeedbackKind.CHOICE: value in (0.5, 1),
        }[kind]
    )
    if not fits:
        raise RewardError(f"{what}: the value of a {kind} is {_ALLOWED[kind]}, got {value!r}")
    if not author.strip():
        raise RewardError(f"{what}: say who gives it (author)")
    if (over is not None) != (kind is FeedbackKind.CHOICE) or over == trajectory_id:
        found = "nothing" if over is None else repr(over)
        raise RewardError(
            f"{what}: a choice, and nothing else, is made over another trajectory; got a {kind} over {found}"
        )
    return {
        "trajectory_id": trajectory_id,
        "kind": kind.value,
        "value": float(value),
        "author": clean_text(author),
        "over": over,
    }


def insert_feedback(connection: Connection, row: dict[str, Any], comment: str) -> None:
    """Write a row of feedback.

    Raises:
        UnknownTrajectoryError: one of its trajectories is not in the store.
    """
    for name in ("trajectory_id", "over"):
        known = select(trajectories.c.seq).where(trajectories.c.id == row[name])
        if row[name] is not None and connection.scalar(known) is None:
            raise unknown(row[name], f"feedback on trajectory {row['trajectory_id']}")
    connection.execute(insert(feedback), {**row, "comment": clean_text(comment), "created_at": time.time()})


def read_feedback(connection: Connection, trajectory_id: str | None, run_id: str | None) -> list[Feedback]:
    """Feedback, oldest first; of one trajectory, of a run's, or all."""
    query = select(feedback).order_by(feedback.c.seq)
    if trajectory_id is not None:
        query = query.where(feedback.c.trajectory_id == trajectory_id)
    if run_id is not None:
        members = select(trajectories.c.id).where(trajectories.c.run_id == run_id)
        query = query.where(feedback.c.trajectory_id.in_(members))
    return [
        Feedback(
            trajectory_id=row.trajectory_id,
            kind=FeedbackKind(row.kind),
            value=row.value,
            author=row.author,
            created_at=row.created_at,
            comment=row.comment,
            over=row.over,
        )
        for row in connection.execute(query)
    ]
