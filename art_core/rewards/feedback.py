"""People's feedback: thumbs, scores and choices, as a person gives them.

Invariant: what a person said is kept with author and time, and changes no reward by itself; `labels_of` and
`preference_rewards` are how it becomes one.

A person -> `thumb`, `rate` or `prefer` -> the store -> labels (`art_core.rewards.labels`), rewards of groups
(`art_core.rewards.preferences`) or pairs to train on (`art_core.rewards.dpo`).
"""

from art_core.errors import RewardError
from art_core.store import Store
from art_core.store.browse import trajectory_row


def thumb(store: Store, trajectory_id: str, *, up: bool, author: str, comment: str = "") -> None:
    """Keep a thumb, up or down.

    Raises:
        RewardError: ``up`` is no truth value, or there is no author.
        UnknownTrajectoryError: the store has no such trajectory.
    """
    _check_truth(up, f"feedback on trajectory {trajectory_id}: up")
    store.add_feedback(trajectory_id, kind="thumb", value=1 if up else -1, author=author, comment=comment)


def rate(store: Store, trajectory_id: str, score: float, *, author: str, comment: str = "") -> None:
    """Keep a score from 0 (useless) to 1 (as good as can be).

    Raises:
        RewardError: the score is not from 0 to 1, or there is no author.
        UnknownTrajectoryError: the store has no such trajectory.
    """
    store.add_feedback(trajectory_id, kind="score", value=score, author=author, comment=comment)


def prefer(
    store: Store, trajectory_id: str, *, over: str, tie: bool = False, author: str, comment: str = ""
) -> None:
    """Keep a choice between two trajectories of one scenario.

    Args:
        store: where both are.
        trajectory_id: the better one.
        over: the other one.
        tie: they are as good as each other.
        author: whose choice it is.
        comment: in the person's words.

    Raises:
        RewardError: the two are of different scenarios, or one and the same, ``tie`` is no truth value, or
            there is no author.
        UnknownTrajectoryError: the store lacks one of them.
    """
    _check_truth(tie, f"the choice of trajectory {trajectory_id} over {over}: tie")
    one, other = (trajectory_row(store, name).scenario_id for name in (trajectory_id, over))
    if one != other:
        raise RewardError(
            f"trajectory {trajectory_id} is of scenario {one!r} and {over} of {other!r}: which is better "
            "says nothing of either; compare two of one scenario"
        )
    store.add_feedback(
        trajectory_id, kind="choice", value=0.5 if tie else 1.0, author=author, comment=comment, over=over
    )


def _check_truth(value: object, what: str) -> None:
    """A word such as "down" counts as true to Python."""
    if not isinstance(value, bool):
        raise RewardError(f"{what} is True or False, got {value!r}")
