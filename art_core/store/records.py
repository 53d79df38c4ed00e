"""What the store hands back that is not part of the vocabulary: runs, scores, metrics, versions, events."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from art_core.types import PolicyVersion


class RunState(StrEnum):
    """What became of a training run."""

    RUNNING = "running"
    """Still going, or its process died."""
    FINISHED = "finished"
    """It did all that was asked of it."""
    STOPPED = "stopped"
    """A person or a guardrail ended it early."""
    FAILED = "failed"
    """It raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run of one model name. Times are Unix seconds.

    Attributes:
        continues: id of the run whose policy this one went on from, as after a restart.
    """

    id: str
    model: str
    config: Mapping[str, Any]
    started_at: float
    ended_at: float | None = None
    state: RunState = RunState.RUNNING
    continues: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One entry of a trajectory's reward history; the latest one is the trajectory's reward.

    Attributes:
        author: who gave it: ``rollout`` for the reward that a rollout ended with, else a rule's,
            judge's or person's name.
        created_at: Unix time, seconds.
    """

    trajectory_id: str
    reward: float
    author: str
    created_at: float
    components: Mapping[str, float]
    explanation: str = ""


class FeedbackKind(StrEnum):
    """How a person judged."""

    THUMB = "thumb"
    """Up (1) or down (-1)."""
    SCORE = "score"
    """From 0 to 1."""
    CHOICE = "choice"
    """Better than another trajectory (1), or as good as it (0.5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What a person said of a trajectory. It changes no reward by itself.

    Attributes:
        value: see `FeedbackKind`.
        over: of a choice: the trajectory that this one was compared with.
        created_at: Unix time, seconds.
    """

    trajectory_id: str
    kind: FeedbackKind
    value: float
    author: str
    created_at: float
    comment: str = ""
    over: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRollout:
    """When a rollout ran and how it ended, without what happened in it.

    Attributes:
        seq: its place among all that began: what began later has a larger one.
        cause: why it failed; None when it did not.
        started_at: Unix time, seconds.
        duration: seconds; None where it is not known.
    """

    seq: int
    id: str
    cause: str | None
    started_at: float
    duration: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """What one training step did with one step of a rollout.

    Attributes:
        run_id: whose training it was.
        train_step: number of the training step, as in the run's metrics.
        step_id: the rollout's step.
        advantage: how much better than its group's baseline the step was; what its tokens were pushed by.
        ratio: probability of each sampled token under the policy that the (last) update found, divided by
            that under the policy that sampled it, neither clipped nor truncated; None where the token was
            no part of it, or the server gave no probability  [completion_tokens].
        trained: whether each sampled token gave a gradient: it was part of the update and its importance
            weight was not 0  [completion_tokens].
        clipped: whether the loss clipped its ratio, which stops or bounds its gradient
            [completion_tokens].
    """

    run_id: str
    train_step: int
    step_id: str
    advantage: float
    ratio: tuple[float | None, ...]
    trained: tuple[bool, ...]
    clipped: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a run at one training step; NaN and infinities are kept as they are.

    Attributes:
        created_at: Unix time, seconds.
        seq: its place among all that was logged: what is logged later has a larger one.
    """

    run_id: str
    step: int
    name: str
    value: float
    created_at: float
    seq: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVersion:
    """A policy version and where its adapter lies; None where the version is the base model itself."""

    policy: PolicyVersion
    adapter_dir: Path | None
    metadata: Mapping[str, Any]
    created_at: float
    run_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run and that a person may ask about later."""

    run_id: str | None
    kind: str
    message: str
    data: Mapping[str, Any]
    created_at: float
