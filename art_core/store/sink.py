"""Rollouts into the store while they run: the store's side of `art_core.recording`.

Invariant: a rollout is encoded in the thread that recorded it, so what is written is what it was then,
and what cannot be written fails there alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select, update

from art_core.errors import ArtError, StoreError, UnknownTrajectoryError
from art_core.recording import Sink
from art_core.store import codec
from art_core.store.codec import EncodedStep, Row
from art_core.store.contents import insert_contents
from art_core.store.database import insert_missing, unwritten
from art_core.store.packing import to_json
from art_core.store.prepared import Prepared
from art_core.store.reading import read_trajectories
from art_core.store.schema import graphs, groups, runs, scenarios, scores, spans, steps, trajectories
from art_core.store.writer import Job, Writer
from art_core.types import RolloutStatus, Span, Step, Trajectory

ROLLOUT = "rollout"
"""Author of the reward that a rollout ended with."""

_INSERT_SCENARIO = Prepared(partial(insert_missing, table=scenarios))
_INSERT_GROUP = Prepared(partial(insert_missing, table=groups))
_INSERT_TRAJECTORY = Prepared(lambda _: insert(trajectories).inline())
_INSERT_STEPS = Prepared(lambda _: insert(steps).inline())
_INSERT_SCORE = Prepared(lambda _: insert(scores).inline())
_END = Prepared(
    lambda _: update(trajectories).where(
        trajectories.c.id == bindparam("ending"), trajectories.c.status == RolloutStatus.RUNNING.value
    )
)
_answered = select(func.max(steps.c.policy_number)).where(steps.c.rollout_id == trajectories.c.id)
_answered_by_own = _answered.join(runs, runs.c.model == steps.c.policy_model).where(
    runs.c.id == trajectories.c.run_id
)
_NOTE_POLICY = Prepared(
    lambda _: (
        update(trajectories)
        .where(trajectories.c.id == bindparam("rollout"))
        .values(policy_number=func.coalesce(_answered_by_own.scalar_subquery(), _answered.scalar_subquery()))
    )
)


class StoreSink:
    """Keeps the rollouts of one run (see `art_core.recording.Sink`).

    Each future is done once what it stands for survives ``kill -9``. It raises `StoreError` when the
    database cannot be written or the record cannot be encoded, and `UnknownTrajectoryError` for a rollout
    that never began here.
    """

    def __init__(
        self, writer: Writer, run_id: str | None, elsewhere: Callable[[], Sink] | None = None
    ) -> None:
        self._writer = writer
        self._run_id = run_id
        self._elsewhere = elsewhere

    def __reduce__(self) -> tuple[Callable[[], Sink], tuple[()]]:
        """Pickled, it is the way to open the same store in another process."""
        if self._elsewhere is None:
            raise StoreError("this sink does not say how to open its store elsewhere; Store.sink() gives one")
        return self._elsewhere, ()

    def begin(self, trajectory: Trajectory) -> Future[None]:
        """Keep a rollout that has just started."""
        what = f"beginning rollout {trajectory.id}"
        try:
            scenario = codec.scenario_row(trajectory.scenario)
            row = codec.trajectory_row(trajectory, scenario["digest"], self._run_id)
        except ArtError as unwritable:
            return _failed(unwritable)

        def apply(connection: Connection) -> None:
            insert_trajectory(connection, row, scenario)

        def refused(connection: Connection) -> ArtError:
            if _exists(connection, trajectory.id):
                return StoreError(
                    f"{what}: there is one with this id already; ids are never used again "
                    "(Rollout.resume goes on with one that has not ended)"
                )
            return StoreError(f"{what}: there is no run {self._run_id} in this store; begin_run gives one")

        return self._writer.submit(Job(what, apply=apply, refused=refused, patient=True))

    def append(self, step: Step) -> Future[None]:
        """Keep one step of a rollout that has begun, also when it has ended since."""
        what = f"recording step {step.id} of rollout {step.rollout_id}"
        try:
            encoded = codec.encode_step(step)
        except ArtError as unwritable:
            return _failed(unwritable)

        def refused(connection: Connection) -> ArtError:
            if not _exists(connection, step.rollout_id):
                return unknown(step.rollout_id, what)
            return StoreError(f"{what}: there is a step with this id already; ids are never used again")

        return self._writer.submit(Job(what, step=encoded, refused=refused, patient=True))

    def end(self, trajectory: Trajectory) -> Future[None]:
        """Keep how a rollout ended."""
        what = f"ending rollout {trajectory.id}"
        try:
            row = codec.outcome_row(trajectory)
        except ArtError as unwritable:
            return _failed(unwritable)
        traced = codec.encode_spans(trajectory.spans) if trajectory.spans else None

        def apply(connection: Connection) -> None:
            if _END.execute(connection, [{**row, "ending": trajectory.id}]) != 1:
                if _exists(connection, trajectory.id):
                    raise StoreError(f"{what}: it has ended already")
                raise unknown(trajectory.id, what)
            insert_spans(connection, trajectory.id, traced)
            insert_reward(connection, trajectory, ROLLOUT)

        return self._writer.submit(Job(what, apply=apply, patient=True))

    def trace(self, rollout_id: str, span: Span) -> Future[None]:
        """Keep a span that came after its rollout had ended."""
        what = f"recording span {span.id} of rollout {rollout_id}"
        traced = codec.encode_spans([span])

        def apply(connection: Connection) -> None:
            insert_spans(connection, rollout_id, traced)

        def refused(connection: Connection) -> ArtError:
            return unknown(rollout_id, what)

        return self._writer.submit(Job(what, apply=apply, refused=refused))

    def graph(self, shape: Mapping[str, Any]) -> Future[None]:
        """Keep a graph's shape, unless this run's are known to have it (see `art_core.sinks.GraphSink`)."""
        what = "recording a graph's shape"
        try:
            row = {"run_id": self._run_id, "body": to_json(dict(shape))}
        except (TypeError, ValueError, RecursionError) as unwritable:
            return _failed(StoreError(f"{what}: {unwritable}"))

        def apply(connection: Connection) -> None:
            known = select(graphs.c.seq).where(
                graphs.c.run_id.is_not_distinct_from(self._run_id), graphs.c.body == row["body"]
            )
            if connection.scalar(known) is None:
                connection.execute(insert(graphs), row)

        return self._writer.submit(Job(what, apply=apply, patient=True))

    def kept(self, rollout_id: str) -> Future[Trajectory | None]:
        """What is kept of a rollout, whichever process recorded it, after all that was queued here."""
        what = f"reading rollout {rollout_id}"

        def apply(connection: Connection) -> Trajectory:
            found = read_trajectories(connection, [trajectories.c.id == rollout_id])
            if not found:
                raise unknown(rollout_id, what)
            return found[0]

        return self._writer.submit(Job(what, apply=apply))


def unknown(trajectory_id: str, what: str) -> UnknownTrajectoryError:
    """The error for a trajectory that is not in the store."""
    return UnknownTrajectoryError(f"{what}: no rollout {trajectory_id} has begun in this store")


def insert_trajectory(connection: Connection, row: Row, scenario: Row) -> None:
    """Write a trajectory's row after those that it refers to."""
    insert_scenario(connection, scenario)
    if row["group_id"] is not None:
        insert_group(connection, row["group_id"], row["run_id"], scenario)
    _INSERT_TRAJECTORY.execute(connection, [row])


def insert_scenario(connection: Connection, scenario: Row) -> None:
    """Write a scenario's row, unless it is there."""
    if unwritten(connection, scenarios, [scenario["digest"]]):
        _INSERT_SCENARIO.execute(connection, [scenario])


def insert_group(connection: Connection, group_id: str, run_id: str | None, scenario: Row) -> None:
    """Write a group's row, unless it is there; the scenario's is."""
    if unwritten(connection, groups, [group_id]):
        row = {"id": group_id, "run_id": run_id, "scenario": scenario["digest"], "created_at": time.time()}
        _INSERT_GROUP.execute(connection, [row])


def insert_steps(connection: Connection, encoded: Sequence[EncodedStep]) -> None:
    """Write steps, and those of their pieces that are not there yet."""
    pieces: dict[bytes, bytes] = {}
    for step in encoded:
        pieces.update(step.pieces)
    insert_contents(connection, pieces)
    _INSERT_STEPS.execute(connection, [step.row for step in encoded])
    _note_policies(connection, [step.row for step in encoded])


def _note_policies(connection: Connection, rows: Sequence[Row]) -> None:
    """Keep with each rollout which version answered in it, the newest; once for each of them.

    Where several policies did, those of the run's own model count, if there are any.
    """
    answered = [
        (r["rollout_id"], r["policy_model"], r["policy_number"])
        for r in rows
        if r["policy_model"] is not None
    ]
    if new := unwritten(connection, trajectories, dict.fromkeys(answered)):
        rollouts = sorted({rollout for rollout, _, _ in new})
        _NOTE_POLICY.execute(connection, [{"rollout": rollout} for rollout in rollouts])


def insert_spans(connection: Connection, rollout_id: str, traced: bytes | None) -> None:
    """Write encoded spans, where there are any."""
    if traced is not None:
        connection.execute(insert(spans), {"rollout_id": rollout_id, "body": traced})


def insert_reward(connection: Connection, trajectory: Trajectory, author: str) -> None:
    """Write a trajectory's reward, where it has one, into its reward history."""
    if trajectory.reward is not None:
        row = {
            "trajectory_id": trajectory.id,
            "reward": trajectory.reward,
            "components": to_json(dict(trajectory.components)),
            "author": author,
            "explanation": "",
            "created_at": time.time(),
        }
        _INSERT_SCORE.execute(connection, [row])


def _exists(connection: Connection, trajectory_id: str) -> bool:
    return connection.scalar(select(trajectories.c.seq).where(trajectories.c.id == trajectory_id)) is not None


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
