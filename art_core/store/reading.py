"""Reading the store: trajectories whole, in short transactions.

Invariant: no transaction is open between two items of an iterator, so a slow reader never keeps SQLite
from folding its write-ahead log back into the file.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Select, func, select

from art_core.store import codec
from art_core.store.contents import read_contents
from art_core.store.database import reading
from art_core.store.records import AdapterVersion, EndedRollout, Event, Metric, Run, RunState, Score
from art_core.store.schema import (
    events,
    metrics,
    policy_versions,
    runs,
    scenarios,
    scores,
    spans,
    steps,
    trajectories,
)
from art_core.types import PolicyVersion, RolloutStatus, Span, Step, Trajectory

_PAGE = 50  # trajectories that are held in memory at a time


def iterate_trajectories(
    engine: Engine, conditions: Sequence[ColumnElement[bool]], limit: int | None, with_steps: bool
) -> Iterator[Trajectory]:
    """Trajectories in the order in which they began, as of the moment when each page is read."""
    after, left = -1, math.inf if limit is None else limit
    while left > 0:
        page = int(min(_PAGE, left))
        query = _trajectory_query(conditions).where(trajectories.c.seq > after)
        with reading(engine) as connection:
            rows = connection.execute(query.order_by(trajectories.c.seq).limit(page)).all()
            found = _whole(connection, rows, with_steps)
        yield from found
        if len(rows) < page:
            return
        after, left = rows[-1].seq, left - page


def read_trajectories(
    connection: Connection, conditions: Sequence[ColumnElement[bool]], *order: ColumnElement[Any]
) -> list[Trajectory]:
    """All the trajectories that meet the conditions, with their steps."""
    rows = connection.execute(_trajectory_query(conditions).order_by(*order, trajectories.c.seq)).all()
    return _whole(connection, rows, with_steps=True)


def _trajectory_query(conditions: Sequence[ColumnElement[bool]]) -> Select[Any]:
    joined = trajectories.join(scenarios, trajectories.c.scenario == scenarios.c.digest)
    return select(trajectories, scenarios.c.body).select_from(joined).where(*conditions)


def _whole(connection: Connection, rows: Sequence[Any], with_steps: bool) -> list[Trajectory]:
    found: dict[str, list[Step]] = defaultdict(list)
    traced: dict[str, list[Span]] = {}
    if with_steps:
        ids = [row.id for row in rows]
        query = select(steps).where(steps.c.rollout_id.in_(ids)).order_by(steps.c.started_at, steps.c.seq)
        found_rows = connection.execute(query).all()
        pieces = read_contents(connection, (d for row in found_rows for d in codec.StepReader.digests(row)))
        reader = codec.StepReader(pieces)
        for row in found_rows:
            found[row.rollout_id].append(reader.step(row))
        traced = read_spans(connection, ids)
    return [
        codec.trajectory_from_row(
            row, codec.scenario_from_body(row.body), found[row.id], traced.get(row.id, ())
        )
        for row in rows
    ]


def read_spans(connection: Connection, rollouts: Sequence[str]) -> defaultdict[str, list[Span]]:
    """What was traced, by rollout, in the order in which it was written."""
    traced: defaultdict[str, list[Span]] = defaultdict(list)
    query = select(spans).where(spans.c.rollout_id.in_(rollouts)).order_by(spans.c.seq)
    for row in connection.execute(query):
        traced[row.rollout_id] += codec.spans_from_body(row.body)
    return traced


def read_runs(connection: Connection, *conditions: ColumnElement[bool]) -> list[Run]:
    """Runs, oldest first."""
    return [
        Run(
            id=row.id,
            model=row.model,
            config=json.loads(row.config),
            started_at=row.started_at,
            ended_at=row.ended_at,
            state=RunState(row.state),
            continues=row.continues,
        )
        for row in connection.execute(select(runs).where(*conditions).order_by(runs.c.seq))
    ]


def read_lineage(connection: Connection, run_id: str) -> list[str]:
    """A run and those that it continues, oldest first."""
    found: list[str] = []
    at: str | None = run_id
    while at is not None and at not in found:
        found.append(at)
        at = connection.scalar(select(runs.c.continues).where(runs.c.id == at))
    return found[::-1]


def read_ended(connection: Connection, run_id: str, after: int) -> tuple[list[EndedRollout], int | None]:
    """A run's rollouts that began after a ``seq`` and have ended; and the first one that still runs."""
    query = select(
        *(trajectories.c[name] for name in ("seq", "id", "status", "failure", "started_at", "duration"))
    ).where(trajectories.c.run_id == run_id, trajectories.c.seq > after)
    ended: list[EndedRollout] = []
    running: int | None = None
    for row in connection.execute(query.order_by(trajectories.c.seq)):
        if row.status == RolloutStatus.RUNNING:
            running = row.seq if running is None else running
            continue
        cause = None
        if row.status == RolloutStatus.FAILED:
            cause = "unknown" if row.failure is None else json.loads(row.failure)["cause"]
        ended.append(
            EndedRollout(
                seq=row.seq, id=row.id, cause=cause, started_at=row.started_at, duration=row.duration
            )
        )
    return ended, running


def read_last_step(connection: Connection, run_id: str) -> int:
    """Number of the last training step that a run has metrics of; 0 without any."""
    return connection.scalar(select(func.max(metrics.c.step)).where(metrics.c.run_id == run_id)) or 0


def read_scores(connection: Connection, trajectory_id: str) -> list[Score]:
    """A trajectory's reward history, oldest first."""
    query = select(scores).where(scores.c.trajectory_id == trajectory_id).order_by(scores.c.seq)
    return [
        Score(
            trajectory_id=row.trajectory_id,
            reward=row.reward,
            author=row.author,
            created_at=row.created_at,
            components=json.loads(row.components),
            explanation=row.explanation,
        )
        for row in connection.execute(query)
    ]


def read_metrics(connection: Connection, run_id: str, name: str | None, after: int = 0) -> list[Metric]:
    """A run's metrics by step, then in the order in which they were logged; those logged after a ``seq``."""
    query = select(metrics).where(metrics.c.run_id == run_id).order_by(metrics.c.step, metrics.c.seq)
    if after:
        query = query.where(metrics.c.seq > after)
    if name is not None:
        query = query.where(metrics.c.name == name)
    return [metric_of(row) for row in connection.execute(query)]


def metric_of(row: Any) -> Metric:
    """A row of ``metrics``."""
    value = math.nan if row.value is None else row.value
    return Metric(row.run_id, row.step, row.name, value, row.created_at, row.seq)


def read_versions(connection: Connection, model: str) -> list[AdapterVersion]:
    """A model's versions, in the order of their numbers."""
    query = select(policy_versions).where(policy_versions.c.model == model)
    return [
        AdapterVersion(
            policy=PolicyVersion(row.model, row.number),
            adapter_dir=None if row.adapter_dir is None else Path(row.adapter_dir),
            metadata=json.loads(row.metadata),
            created_at=row.created_at,
            run_id=row.run_id,
        )
        for row in connection.execute(query.order_by(policy_versions.c.number))
    ]


def read_events(connection: Connection, run_id: str | None, kind: str | None) -> list[Event]:
    """Events, oldest first; of all runs when none is named."""
    query = select(events).order_by(events.c.seq)
    if run_id is not None:
        query = query.where(events.c.run_id == run_id)
    if kind is not None:
        query = query.where(events.c.kind == kind)
    return [event_of(row) for row in connection.execute(query)]


def event_of(row: Any) -> Event:
    """A row of ``events``."""
    return Event(
        run_id=row.run_id,
        kind=row.kind,
        message=row.message,
        data=json.loads(row.data),
        created_at=row.created_at,
    )
