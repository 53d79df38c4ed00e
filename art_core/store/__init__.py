"""The durable record of a project (see `art_core.store.store`)."""

from art_core.store.records import (
    AdapterVersion,
    EndedRollout,
    Event,
    Feedback,
    FeedbackKind,
    Metric,
    Run,
    RunState,
    Score,
    TrainedStep,
)
from art_core.store.store import Store

__all__ = [
    "AdapterVersion",
    "EndedRollout",
    "Event",
    "Feedback",
    "FeedbackKind",
    "Metric",
    "Run",
    "RunState",
    "Score",
    "Store",
    "TrainedStep",
]
