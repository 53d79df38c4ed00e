"""RunRecord: what the store, its curves and its sinks are told of one run of a registration.

Invariant: what was trained from is in the record before it is trained, and a version is there only when its
numbers are; whoever is killed between the two is completed by the next one.

Groups are kept before training, a training step after it was published; what happens in between is an event.
"""

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from art_core.backends.base import LastUpdate
from art_core.backends.ending import in_words as failure_in_words
from art_core.backends.ending import state_at_the_end
from art_core.config import TrainableModelConfig
from art_core.inference.engine import EngineEvent
from art_core.observe.machine import environment, in_words
from art_core.observe.phases import Training
from art_core.observe.run_log import RunLog
from art_core.observe.sinks.base import MetricSink
from art_core.recording import Sink
from art_core.store import RunState, Store
from art_core.training.guardrails import TrainEvent
from art_core.training.knobs import Turned
from art_core.types import PolicyVersion, TrajectoryGroup

if TYPE_CHECKING:
    from art_core.training.report import TrainReport

logger = logging.getLogger(__name__)


class RunRecord:
    """The record of one run, from its registration to its end.

    Args:
        store: of the project.
        config: of the model.
        directory: its checkpoints.
        sinks: where numbers go beside the store.
    """

    def __init__(
        self, store: Store, config: TrainableModelConfig, directory: Path, sinks: Sequence[MetricSink]
    ) -> None:
        self._store = store
        self._model = config.name
        self._run = store.begin_run(
            config.name,
            {
                **config.model_dump(mode="json"),
                "checkpoints": str(directory.parent.resolve()),  # where knobs.json is, too
                "process": {"host": socket.gethostname(), "pid": os.getpid()},
            },
            continues=_run_to_go_on_from(store, config.name, directory),
        )
        self._log = RunLog(store, self._run, sinks, directory.parent)
        self.sink: Sink = store.sink(self._run)
        where = environment()
        self.event("environment", in_words(where), where)

    def begin(self) -> None:
        """From now on its time is taken, and sinks are told."""
        self._log.begin()

    def show(self, registry: CollectorRegistry) -> None:
        """Let whoever serves a registry of Prometheus show its newest numbers."""
        self._log.show(registry)

    def event(self, kind: str, message: str, data: Mapping[str, Any] | None = None) -> None:
        """Keep something that happened."""
        self._store.add_event(self._run, kind, message, data)

    def engine_event(self, event: EngineEvent) -> None:
        """Keep what an engine did by itself."""
        self.event(event.kind, event.message, event.data)

    def happened(self, event: TrainEvent | Turned) -> None:
        """Keep what training did by itself, or somebody turned."""
        self.event(event.kind, event.message, asdict(event))

    def note(self, values: Mapping[str, float]) -> None:
        """Keep somebody else's numbers beside those of the newest training step."""
        self._log.note(values)

    def keep_groups(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Keep groups as they were scored; they come back with the ids under which the store knows them."""
        ids = self._store.save_groups(groups, run_id=self._run)
        return [replace(group, id=id_) for group, id_ in zip(groups, ids, strict=True)]

    def trained(
        self,
        report: "TrainReport",
        groups: Sequence[TrajectoryGroup],
        training: Training,
        version: PolicyVersion,
        measured: Mapping[str, float],
        adapter: Path | None,
    ) -> None:
        """Keep what a training step did.

        Args:
            report: of the trainer.
            groups: what was gathered for it.
            training: when it did what.
            version: that is served now.
            measured: by others, meanwhile.
            adapter: where what it made lies; None: it made no version.
        """
        self._log.record(report, groups, training, version.number, measured)
        if adapter is not None:
            # Last, so that a version on record has its metrics there: see `complete`.
            self._store.add_version(version, adapter, run_id=self._run)

    def complete(self, update: LastUpdate, model: str, adapter: Path) -> None:
        """Keep an update whose process ended before it could, unless it is there.

        Args:
            update: that made the newest checkpoint.
            model: whose update it was.
            adapter: what it made.
        """
        if model != self._model or update.version in {v.policy for v in self._store.versions(model)}:
            return  # a fork begins with what was another model's update
        self._log.complete(update.report, update.version.number)
        self._store.add_version(update.version, adapter, run_id=self._run)

    def newest_version(self, loaded: PolicyVersion) -> int:
        """The greatest number that a version of the model has had; 0 where there was none.

        Args:
            loaded: what training goes on from; that it is an older one is kept as an event.
        """
        newest = max((v.policy.number for v in self._store.versions(self._model)), default=0)
        if newest > loaded.number:
            begins = str(loaded) if loaded.number else "the base model"
            message = (
                f"the checkpoint of version {newest}, the newest on record, is gone: training goes on from "
                f"{begins}, and the next version is {newest + 1}"
            )
            logger.warning("model %s: %s", self._model, message)
            self.event("checkpoint_missing", message)
        return newest

    def ending(self, failure: BaseException | None, *, stopped: bool) -> RunState:
        """How the run ends, kept as an event where it fails.

        Args:
            failure: what ended it before its time, if something did.
            stopped: whether a guardrail had stopped training.
        """
        state = state_at_the_end(failure, stopped=stopped)
        if failure is not None and state is RunState.FAILED:
            self.event("run_failed", failure_in_words(failure))
        return state

    def close(self, state: RunState) -> None:
        """Tell sinks the rest, and how the run ended."""
        self._log.close(state)
        self._store.end_run(self._run, state)


def _run_to_go_on_from(store: Store, model: str, directory: Path) -> str | None:
    """The run that made the version from which a model goes on; None when it begins anew."""
    from art_core.training import checkpoints

    if checkpoints.latest(directory) is None:
        return None
    # Of a process that died while it published, the newest version may be missing here.
    made = [version.run_id for version in store.versions(model) if version.run_id is not None]
    return made[-1] if made else None
