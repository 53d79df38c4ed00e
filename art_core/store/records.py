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
    """One training run of one model name. Times are Unix seconds."""

    id: str
    model: str
    config: Mapping[str, Any]
    started_at: float
    ended_at: float | None = None
    state: RunState = RunState.RUNNING


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


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a run at one training step; NaN and infinities are kept as they are."""

    run_id: str
    step: int
    name: str
    value: float
    created_at: float


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
