"""The durable record of a project (see `art_core.store.store`)."""

from art_core.store.records import AdapterVersion, Event, Metric, Run, RunState, Score
from art_core.store.store import Store

__all__ = ["AdapterVersion", "Event", "Metric", "Run", "RunState", "Score", "Store"]
