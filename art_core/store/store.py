"""The durable record of a project: what was run, what it was worth, what came of it.

Invariant: what a method has written survives ``kill -9`` once the method has returned (or, for a sink,
once its future is done), and what failed to be written has left nothing behind.

All writing of a process goes through one thread (`writer`), so that hundreds of rollouts share its commits;
reading goes straight to the database and may happen in any thread and in any other process.
"""

import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any, Self, TypeVar

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from art_core.errors import StoreError, UnknownTrajectoryError
from art_core.recording import Sink, new_id
from art_core.store import codec, reading
from art_core.store.database import location, open_database, sqlite_url
from art_core.store.database import reading as read_transaction
from art_core.store.feedback import check_feedback, insert_feedback, read_feedback
from art_core.store.packing import clean_text, to_json
from art_core.store.records import (
    AdapterVersion,
    Event,
    Feedback,
    FeedbackKind,
    Metric,
    Run,
    RunState,
    Score,
    TrainedStep,
)
from art_core.store.saving import save_group, save_score, save_trajectory
from art_core.store.schema import (
    events,
    groups,
    metrics,
    policy_versions,
    runs,
    scenarios,
    trajectories,
)
from art_core.store.sink import StoreSink, insert_steps
from art_core.store.trained import StepTraining, insert_trained, read_trained
from art_core.store.writer import Job, Writer
from art_core.types import PolicyVersion, RolloutStatus, Trajectory, TrajectoryGroup, check_reward

T = TypeVar("T")

_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Store:
    """A project's store; thread-safe. Use `Store.open`, and close it (or use it as a context manager).

    Attributes:
        project: whose it is.
        location: the file, or the URL without its password.
    """

    def __init__(self, project: str, url: Any) -> None:
        self.project = project
        self._engine = open_database(url, project)
        self.location = location(self._engine)
        self._writer = Writer(self._engine, insert_steps)
        self._process = os.getpid()
        # Also when the store is forgotten without being closed, and when the interpreter ends.
        self._finish = weakref.finalize(self, _shut, self._writer, self._engine, self._process)

    @classmethod
    def open(cls, project: str, root: str | Path = ".art", *, url: str | None = None) -> "Store":
        """Open a project's store, which is created, or brought to the newest schema, where needed.

        Args:
            project: the project's name; its file is ``<root>/<project>.db``.
            root: directory of the files.
            url: a database's URL (SQLAlchemy's form, ``postgresql://...``) in place of a file.

        Raises:
            StoreError: it cannot be opened, belongs to another project, or is newer than this code.
        """
        if not _PROJECT.fullmatch(project):
            raise StoreError(
                f"project {project!r} cannot be a file's name: use letters, digits, '.', '_' and '-', and "
                "begin with a letter or digit"
            )
        return cls(project, sqlite_url(Path(root) / f"{project}.db") if url is None else url)

    def close(self) -> None:
        """Write what is queued, then let go of the database. Closing twice is harmless."""
        self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    # -- rollouts ----------------------------------------------------------------------------------

    def sink(self, run_id: str | None = None) -> Sink:
        """Where rollouts record themselves while they run.

        Args:
            run_id: the run that they belong to; None for rollouts of no run.
        """
        self._check_process()
        url = self._engine.url.render_as_string(hide_password=False)
        return StoreSink(self._writer, run_id, partial(_sink_elsewhere, self.project, url, run_id))

    def save_group(self, group: TrajectoryGroup, *, run_id: str | None = None) -> str:
        """Keep a group: its members, their order, and what is new about them.

        Members and steps that the store lacks are added; of those that it has, outcome and reward are
        brought up to the given ones.

        Returns:
            The group's id; a new one where the group has none.
        """
        group_id = group.id or new_id("g")
        return self._write(
            f"saving group {group_id}",
            lambda connection: save_group(connection, group, group_id, run_id),
            run_id,
        )

    def save_trajectory(self, trajectory: Trajectory, *, run_id: str | None = None) -> None:
        """Keep a trajectory that ran elsewhere (an import, another process), or what is new about one."""
        self._write(
            f"saving trajectory {trajectory.id}",
            lambda connection: save_trajectory(connection, trajectory, run_id),
            run_id,
        )

    def score(
        self,
        trajectory_id: str,
        reward: float,
        *,
        components: Mapping[str, float] | None = None,
        author: str,
        explanation: str = "",
    ) -> None:
        """Give a trajectory a reward; earlier ones stay in its history.

        Raises:
            RewardError: the reward is not a finite number, or the rollout failed.
            UnknownTrajectoryError: there is no such trajectory.
        """
        reward = check_reward(reward, f"trajectory {trajectory_id}")
        made_of = to_json(dict(components or {}))
        self._write(
            f"scoring trajectory {trajectory_id}",
            lambda connection: save_score(
                connection, trajectory_id, reward, made_of, author=author, explanation=explanation
            ),
        )

    def trajectory(self, trajectory_id: str) -> Trajectory:
        """One trajectory with its steps, in the order in which they started.

        Raises:
            UnknownTrajectoryError: there is none with this id.
        """
        with read_transaction(self._engine) as connection:
            found = reading.read_trajectories(connection, [trajectories.c.id == trajectory_id])
        if not found:
            raise UnknownTrajectoryError(f"{self.location} has no trajectory {trajectory_id}")
        return found[0]

    def trajectories(
        self,
        run_id: str | None = None,
        group_id: str | None = None,
        scenario_id: str | None = None,
        status: RolloutStatus | str | None = None,
        limit: int | None = None,
        with_steps: bool = True,
    ) -> Iterator[Trajectory]:
        """Trajectories in the order in which they began; each condition that is given narrows them down."""
        conditions: list[ColumnElement[bool]] = []
        if run_id is not None:
            conditions.append(trajectories.c.run_id == run_id)
        if group_id is not None:
            conditions.append(trajectories.c.group_id == group_id)
        if scenario_id is not None:
            conditions.append(scenarios.c.scenario_id == scenario_id)
        if status is not None:
            conditions.append(trajectories.c.status == RolloutStatus(status).value)
        return reading.iterate_trajectories(self._engine, conditions, limit, with_steps)

    def group(self, group_id: str) -> TrajectoryGroup:
        """A group with its members: those of `save_group` in its order, then others as they began.

        Raises:
            UnknownTrajectoryError: there is none with this id.
        """
        with read_transaction(self._engine) as connection:
            joined = groups.join(scenarios, groups.c.scenario == scenarios.c.digest)
            body = connection.scalar(
                select(scenarios.c.body).select_from(joined).where(groups.c.id == group_id)
            )
            if body is None:
                raise UnknownTrajectoryError(f"{self.location} has no group {group_id}")
            members = reading.read_trajectories(
                connection,
                [trajectories.c.group_id == group_id],
                trajectories.c.group_position.asc().nulls_last(),
            )
        return TrajectoryGroup(codec.scenario_from_body(body), tuple(members), id=group_id)

    def scores(self, trajectory_id: str) -> list[Score]:
        """A trajectory's reward history, oldest first."""
        with read_transaction(self._engine) as connection:
            return reading.read_scores(connection, trajectory_id)

    def read(self) -> AbstractContextManager[Connection]:
        """A transaction for queries of one's own over the tables of `art_core.store.schema`, as in a ``with``.

        It sees one state of the database, and must not write.
        """
        return read_transaction(self._engine)

    def add_feedback(
        self,
        trajectory_id: str,
        *,
        kind: FeedbackKind | str,
        value: float,
        author: str,
        comment: str = "",
        over: str | None = None,
    ) -> None:
        """Keep what a person says of a trajectory. The trajectory's reward stays as it is.

        Args:
            trajectory_id: of which it is said.
            kind: ``thumb``, ``score`` or ``choice``.
            value: see `FeedbackKind`.
            author: who says it.
            comment: in their own words.
            over: of a choice: the trajectory that it is better than, or as good as.

        Raises:
            RewardError: the value is none of that kind, or a choice lacks what it was made over.
            UnknownTrajectoryError: there is no such trajectory.
        """
        row = check_feedback(trajectory_id, kind, value, author, over)
        self._write(
            f"keeping feedback on trajectory {trajectory_id}",
            lambda connection: insert_feedback(connection, row, comment),
        )

    def feedback(self, trajectory_id: str | None = None, run_id: str | None = None) -> list[Feedback]:
        """What people said, oldest first: of one trajectory, of those of a run, or of all."""
        with read_transaction(self._engine) as connection:
            return read_feedback(connection, trajectory_id, run_id)

    # -- runs --------------------------------------------------------------------------------------

    def begin_run(
        self, model: str, config: Mapping[str, Any] | None = None, *, continues: str | None = None
    ) -> str:
        """Begin a training run of a model name.

        Args:
            model: the name that learns.
            config: its settings, as JSON can hold them.
            continues: the run whose policy it goes on from.

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

    def trained(self, trajectory_id: str) -> list[TrainedStep]:
        """What training did with a trajectory's steps, oldest first; empty where none was trained."""
        with read_transaction(self._engine) as connection:
            return read_trained(connection, trajectory_id)

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

    def latest_version(self, model: str) -> AdapterVersion | None:
        """A model's version with the highest number; None when it has none."""
        found = self.versions(model)
        return found[-1] if found else None

    # -- writing -----------------------------------------------------------------------------------

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StoreError(
                f"{self.location} was opened by process {self._process}, and this one is a fork of it: "
                "open the store again here"
            )

    def _run(self, job: Job) -> Any:
        self._check_process()
        return self._writer.submit(job).result()

    def _write(self, what: str, apply: Callable[[Connection], T], run_id: str | None = None) -> T:
        return self._run(
            Job(what, apply=apply, refused=lambda connection: self._unknown_run(connection, what, run_id))
        )

    def _insert(self, what: str, table: Any, row: codec.Row, run_id: str | None = None) -> None:
        def apply(connection: Connection) -> None:
            connection.execute(insert(table), row)

        self._write(what, apply, run_id)

    def _unknown_run(self, connection: Connection, what: str, run_id: str | None) -> StoreError | None:
        if run_id is None or reading.read_runs(connection, runs.c.id == run_id):
            return None
        return StoreError(f"{what}: {self.location} has no run {run_id}; begin_run gives one")


def _json(value: Mapping[str, Any] | None, what: str) -> str:
    try:
        return to_json(dict(value or {}))
    except (TypeError, ValueError, RecursionError) as unwritable:
        raise StoreError(f"{what} cannot be recorded: {unwritable}; give what JSON can hold") from unwritable


@cache
def _opened_elsewhere(project: str, url: str) -> Store:
    return Store.open(project, url=url)


def _sink_elsewhere(project: str, url: str, run_id: str | None) -> Sink:
    """The sink of a store that another process has open; this process opens it once."""
    return _opened_elsewhere(project, url).sink(run_id)


def _shut(writer: Writer, engine: Any, process: int) -> None:
    if os.getpid() == process:  # a fork has no writer thread to wait for
        writer.close()
        engine.dispose()
