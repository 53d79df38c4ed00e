"""What the store keeps of runs: their numbers, their events, what they trained, their policy versions.

Invariant: what is written names a run that is there; a version is written once and never used again.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from art_core.errors import StoreError
from art_core.recording import new_id
from art_core.store import reading
from art_core.store.base import OpenStore
from art_core.store.database import reading as read_transaction
from art_core.store.packing import clean_text, to_json
from art_core.store.records import AdapterVersion, EndedRollout, Event, Metric, Run, RunState
from art_core.store.schema import events, metrics, policy_versions, runs
from art_core.store.trained import StepTraining, insert_trained
from art_core.store.writer import Job
from art_core.types import PolicyVersion

CONTINUED = "run_continued"
"""Kind of the event with which a run begins that goes on from another one."""


class RunRecords(OpenStore):
    """The part of a store that is about runs."""

    def begin_run(
        self, model: str, config: Mapping[str, Any] | None = None, *, continues: str | None = None
    ) -> str:
        """Begin a training run of a model name.

        Args:
            model: the name that learns.
            config: its settings, as JSON can hold them.
            continues: the run whose policy it goes on from; an event says so, too (`CONTINUED`).

        Returns:
            The run's id.
        """
        run_id = new_id("r")
        row = {
            "id": run_id,
            "model": model,
            "config": _json(config, f"the config of run {run_id}"),
            "started_at": time.time(),
            "state": RunState.RUNNING.value,
            "continues": continues,
        }
        self._insert(f"beginning run {run_id}", runs, row)
        if continues is not None:
            self.add_event(run_id, CONTINUED, f"goes on from run {continues}", {"continues": continues})
        return run_id

    def end_run(self, run_id: str, state: RunState | str = RunState.FINISHED) -> None:
        """End a run.

        Raises:
            StoreError: there is no such run.
        """
        values = {"state": RunState(state).value, "ended_at": time.time()}

        def apply(connection: Connection) -> None:
            if connection.execute(update(runs).where(runs.c.id == run_id).values(values)).rowcount != 1:
                raise StoreError(f"ending run {run_id}: {self.location} has no such run")

        self._write(f"ending run {run_id}", apply)

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        with read_transaction(self._engine) as connection:
            return reading.read_runs(connection)

    def lineage(self, run_id: str) -> list[str]:
        """Ids of a run and of those that it continues, oldest first."""
        with read_transaction(self._engine) as connection:
            return reading.read_lineage(connection, run_id)

    def last_step(self, run_id: str) -> int:
        """Number of the last training step that a run has metrics of; 0 without any."""
        with read_transaction(self._engine) as connection:
            return reading.read_last_step(connection, run_id)

    def ended(self, run_id: str, after: int = 0) -> tuple[list[EndedRollout], int | None]:
        """How a run's rollouts ended, without reading what happened in them.

        Args:
            run_id: of the run.
            after: only rollouts that began after the one with this ``seq``.

        Returns:
            Those that have ended, and the ``seq`` of the first that still runs, None when none does.
        """
        with read_transaction(self._engine) as connection:
            return reading.read_ended(connection, run_id, after)

    def log_metrics(self, run_id: str, step: int, values: Mapping[str, float]) -> None:
        """Keep a training step's numbers; those of an earlier attempt at the same step are replaced."""
        now = time.time()
        rows = [
            {"run_id": run_id, "step": step, "name": name, "value": float(value), "created_at": now}
            for name, value in values.items()
        ]

        def apply(connection: Connection) -> None:
            stale = metrics.c.name.in_(list(values))
            connection.execute(
                delete(metrics).where(metrics.c.run_id == run_id, metrics.c.step == step, stale)
            )
            connection.execute(insert(metrics), rows)

        if rows:
            self._write(f"logging metrics of step {step}", apply, run_id)

    def metrics(self, run_id: str, name: str | None = None, *, after: int = 0) -> list[Metric]:
        """A run's metrics by step.

        Args:
            run_id: of the run.
            name: of the metric; None: all of them.
            after: only what was logged after a metric with this ``seq``, so that a run can be followed.
        """
        with read_transaction(self._engine) as connection:
            return reading.read_metrics(connection, run_id, name, after)

    def log_trained(self, run_id: str, train_step: int, trained: Sequence[StepTraining]) -> None:
        """Keep what a training step did with the steps of rollouts, which the store holds.

        Args:
            run_id: whose training it was.
            train_step: its number, as in `log_metrics`.
            trained: the trainer's account; an earlier one of the same training step is replaced.
        """
        if trained:
            self._write(
                f"keeping what training step {train_step} trained",
                lambda connection: insert_trained(connection, run_id, train_step, trained),
                run_id,
            )

    def add_event(
        self, run_id: str | None, kind: str, message: str, data: Mapping[str, Any] | None = None
    ) -> None:
        """Keep something that happened (a skipped update, a restarted server, ...)."""
        row = {
            "run_id": run_id,
            "kind": kind,
            "message": clean_text(message),
            "data": _json(data, f"the data of event {kind!r}"),
            "created_at": time.time(),
        }
        self._insert(f"recording event {kind!r}", events, row, run_id)

    def events(self, run_id: str | None = None, kind: str | None = None) -> list[Event]:
        """Events, oldest first; of all runs when none is named."""
        with read_transaction(self._engine) as connection:
            return reading.read_events(connection, run_id, kind)

    # -- policy versions ---------------------------------------------------------------------------

    def add_version(
        self,
        policy: PolicyVersion,
        adapter_dir: str | Path | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        run_id: str | None = None,
    ) -> None:
        """Keep a policy version and where its adapter lies (None: the base model itself).

        Raises:
            StoreError: the version is there already; versions are never used again.
        """
        what = f"adding policy version {policy}"
        row = {
            "model": policy.model,
            "number": policy.number,
            "run_id": run_id,
            "adapter_dir": None if adapter_dir is None else str(adapter_dir),
            "metadata": _json(metadata, f"the metadata of {policy}"),
            "created_at": time.time(),
        }

        def refused(connection: Connection) -> StoreError | None:
            taken = select(policy_versions).where(
                policy_versions.c.model == policy.model, policy_versions.c.number == policy.number
            )
            if connection.execute(taken).first() is not None:
                return StoreError(f"{what}: it is there already, and versions are never used again")
            return self._unknown_run(connection, what, run_id)

        self._run(Job(what, apply=lambda c: c.execute(insert(policy_versions), row), refused=refused))

    def versions(self, model: str) -> list[AdapterVersion]:
        """A model's versions, in the order of their numbers."""
        with read_transaction(self._engine) as connection:
            return reading.read_versions(connection, model)


def _json(value: Mapping[str, Any] | None, what: str) -> str:
    try:
        return to_json(dict(value or {}))
    except (TypeError, ValueError, RecursionError) as unwritable:
        raise StoreError(f"{what} cannot be recorded: {unwritable}; give what JSON can hold") from unwritable
