"""What a learning loop keeps in its state.

Invariant: plain data and ids; see `art_langgraph.graph_records`.
"""

import operator
from typing import Annotated, TypedDict

from art_langgraph.graph_records import RolloutRecord, ScoreRecord, by_trajectory, newest_batch


class StepRecord(TypedDict):
    """One training step.

    Attributes:
        step: its number, from 1.
        policy: the version that came out; the one before, where nothing was updated.
        reward_mean: over the scored rollouts; None without any.
        rollouts: how many were made.
        failed: how many of them failed.
        unscored: how many were left without a score by the judge, or excluded by somebody.
        updated: whether the weights changed.
        skipped: why nothing was trained; None when something was.
    """

    step: int
    policy: int
    reward_mean: float | None
    rollouts: int
    failed: int
    unscored: int
    updated: bool
    skipped: str | None


class EvaluationRecord(TypedDict):
    """One evaluation.

    Attributes:
        step: after which training step; 0 before the first.
        policy: the version that was evaluated.
        reward_mean: over the scored trials; None without any.
        finished: trials that have a reward.
        failed: trials that failed; they are no zeros in the mean.
    """

    step: int
    policy: int
    reward_mean: float | None
    finished: int
    failed: int


class LearningState(TypedDict):
    """The state of a learning loop; a graph of one's own may add to it.

    Attributes:
        run: names the run; ids of rollouts follow from it.
        step: training steps made.
        policy: number of the version that the newest rollouts or trials began with.
        next: what ``plan`` decided: ``rollout``, ``trial`` or ``end``.
        rollouts: those of the newest step.
        scores: what the judge said of them.
        excluded: ids of trajectories or groups that are not to be trained on; for people and nodes who look
            before ``train``.
        trials: rollouts of the newest evaluation.
        metrics: what the newest step's training said (`art_core.training.report.TrainReport`); those of all
            steps are in the store.
        history: every step.
        evaluations: every evaluation.
    """

    run: str
    step: int
    policy: int
    next: str
    rollouts: Annotated[list[RolloutRecord], newest_batch]
    scores: Annotated[list[ScoreRecord], by_trajectory]
    excluded: Annotated[list[str], operator.add]
    trials: Annotated[list[RolloutRecord], newest_batch]
    metrics: dict[str, float]
    history: Annotated[list[StepRecord], operator.add]
    evaluations: Annotated[list[EvaluationRecord], operator.add]
