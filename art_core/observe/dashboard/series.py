"""Series: metrics as columns, thinned to what a screen can show, and following what is added.

They are read of a line of runs, each of which continues the one before: a restart is no end of a curve.

Invariant: series and the position that is handed out with them are of one state of the store, and what is
read from a position on is everything that came after it, each row once.

A position names the newest metric and event that were read. Metrics of a step that is logged again are
deleted and written anew, possibly under the same numbers; so a position also says when its metric was
written, and if that does not fit any more, the reader is told to begin again.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Connection, func, or_, select

from art_core.errors import ConfigError, UnknownRunError
from art_core.observe.signs import SAMPLED
from art_core.store import Store
from art_core.store.reading import event_of, metric_of, read_runs
from art_core.store.records import Event, Metric, Run
from art_core.store.schema import events, metrics, runs, trajectories
from art_core.views.curves import Curve

MOST_POINTS = 1000
"""Points of one series that a page is sent."""

_MOST_SAID = 5000  # characters of a message that are read


@dataclass(frozen=True, slots=True)
class Position:
    """How far a reader has read.

    Attributes:
        metric: number of the newest metric of the run, 0 before the first.
        written_at: when that was written, Unix time in seconds.
        event: number of the newest event of the run, 0 before the first.
    """

    metric: int = 0
    written_at: float = 0.0
    event: int = 0

    def __str__(self) -> str:
        return f"{self.metric}~{self.written_at!r}~{self.event}"

    @classmethod
    def parse(cls, text: str) -> "Position":
        """The inverse of ``str``.

        Raises:
            ConfigError: it is no position.
        """
        try:
            metric, written_at, event = text.split("~")
            return cls(int(metric), float(written_at), int(event))
        except ValueError:
            raise ConfigError(f"{text[:80]!r} is no position; leave 'after' out to begin anew") from None


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of a run.

    Attributes:
        name: of the metric.
        steps: training steps, ascending  [points].
        values: at those steps; None where the value is not finite  [points].
        times: when each was written, Unix seconds  [points].
    """

    name: str
    steps: Sequence[int]
    values: Sequence[float | None]
    times: Sequence[float]

    @property
    def last(self) -> float | None:
        """The newest value that is a number."""
        return next((v for v in reversed(self.values) if v is not None), None)

    @property
    def curve(self) -> Curve:
        """The same without times."""
        values = tuple(math.nan if value is None else value for value in self.values)
        return Curve(self.name, tuple(self.steps), values)

    def thinned(self, most: int = MOST_POINTS) -> "Series":
        """At most so many points: the least and the greatest of every stretch, and both ends."""
        if len(self.steps) <= most:
            return self
        width = math.ceil(len(self.steps) / (most // 2 - 1))
        kept = {0, len(self.steps) - 1}
        for start in range(0, len(self.steps), width):
            finite = [
                i for i in range(start, min(start + width, len(self.steps))) if self.values[i] is not None
            ]
            if finite:
                kept |= {min(finite, key=self._value), max(finite, key=self._value)}
        order = sorted(kept)
        return Series(
            self.name,
            [self.steps[i] for i in order],
            [self.values[i] for i in order],
            [self.times[i] for i in order],
        )

    def _value(self, index: int) -> float:
        return self.values[index] or 0.0


@dataclass(frozen=True, slots=True)
class Changes:
    """What came after a position.

    Attributes:
        position: where to go on.
        metrics: in the order in which they were written.
        events: oldest first.
        run: the run as it is now.
        trajectories: how many it has.
        again: what was read before the position has changed; begin anew.
    """

    position: Position
    metrics: Sequence[Metric]
    events: Sequence[Event]
    run: Run
    trajectories: int
    again: bool = False


def read_run(connection: Connection, run_id: str) -> Run:
    """A run's record.

    Raises:
        UnknownRunError: there is none.
    """
    found = read_runs(connection, runs.c.id == run_id)
    if not found:
        raise UnknownRunError(f"there is no run {run_id[:80]!r} in this record")
    return found[0]


def last_step(connection: Connection, line: Sequence[str]) -> int:
    """The newest training step of a line of runs; 0 before the first."""
    return connection.scalar(select(func.max(metrics.c.step)).where(metrics.c.run_id.in_(line))) or 0


def metric_names(connection: Connection, line: Sequence[str]) -> list[str]:
    """Names of a line's metrics, by the alphabet."""
    return sorted(connection.scalars(select(metrics.c.name).where(metrics.c.run_id.in_(line)).distinct()))


def read_series(
    connection: Connection, line: Sequence[str], names: Sequence[str], most: int = MOST_POINTS
) -> dict[str, Series]:
    """Some metrics of a line of runs, `Series.thinned`; a name that it has no values of is left out."""
    of = metrics.c
    query = select(of.name, of.step, of.value, of.created_at).where(of.run_id.in_(line), of.name.in_(names))
    return {name: one.thinned(most) for name, one in _columns(connection, query, names).items()}


def sampled_series(
    connection: Connection, line: Sequence[str], names: Sequence[str], last: int, *, lately: int
) -> dict[str, Series]:
    """Every so many steps of some metrics, and the last ones: quick also where a run has many thousands.

    Args:
        connection: in a transaction.
        line: ids of the runs.
        names: of the metrics.
        last: the newest step, see `last_step`.
        lately: how many steps before it are all there.
    """
    of = metrics.c
    some = or_(of.step % max(1, last // SAMPLED) == 0, of.step > last - lately)
    query = select(of.name, of.step, of.value, of.created_at).where(of.run_id.in_(line), some)
    return _columns(connection, query.where(of.name.in_(names)), names)


def _columns(connection: Connection, query: Any, names: Sequence[str]) -> dict[str, Series]:
    columns: dict[str, tuple[list[int], list[float | None], list[float]]] = {}
    # Taken apart as tuples: a run of thousands of steps has hundreds of thousands of rows.
    rows = cast(
        "Iterable[tuple[str, int, float | None, float]]",
        connection.execute(query.order_by(metrics.c.step, metrics.c.seq)),
    )
    for name, step, value, at in rows:
        steps, values, times = columns.setdefault(name, ([], [], []))
        if steps and steps[-1] == step:  # a later run has said it again
            values[-1], times[-1] = _finite(value), at
            continue
        steps.append(step)
        values.append(_finite(value))
        times.append(at)
    return {name: Series(name, *columns[name]) for name in names if name in columns}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def position_of(connection: Connection, run_id: str) -> Position:
    """The end of a run's metrics and events as they are now."""
    newest = connection.execute(
        select(metrics.c.seq, metrics.c.created_at)
        .where(metrics.c.run_id == run_id)
        .order_by(metrics.c.seq.desc())
        .limit(1)
    ).first()
    event = connection.scalar(select(func.max(events.c.seq)).where(events.c.run_id == run_id)) or 0
    return Position(event=event) if newest is None else Position(newest[0], newest[1], event)


def newest_events(connection: Connection, line: Sequence[str], most: int) -> tuple[list[Event], int]:
    """The newest events of a line of runs, oldest first, without data and the ends of endless messages.

    Args:
        connection: in a transaction.
        line: ids of the runs.
        most: how many at most.

    Returns:
        The events, and how many there are in all.
    """
    of = events.c
    message = func.substr(of.message, 1, _MOST_SAID).label("message")
    query = select(of.run_id, of.kind, message, of.created_at).where(of.run_id.in_(line))
    rows = connection.execute(query.order_by(of.seq.desc()).limit(most)).all()
    count = connection.scalar(select(func.count()).select_from(events).where(of.run_id.in_(line))) or 0
    found = [
        Event(run_id=r.run_id, kind=r.kind, message=r.message, data={}, created_at=r.created_at) for r in rows
    ]
    return found[::-1], count


def changes_since(store: Store, run_id: str, position: Position) -> Changes:
    """What came after a position.

    Raises:
        UnknownRunError: there is no such run.
        StoreError: the store cannot be read.
    """
    with store.read() as connection:
        run = read_run(connection, run_id)
        made = select(func.count()).select_from(trajectories).where(trajectories.c.run_id == run_id)
        count = connection.scalar(made) or 0
        if not _holds(connection, run_id, position):
            return Changes(position, (), (), run, count, again=True)
        # Nothing of any run is newer, most of the time: asked first, since that costs nothing.
        rows: Sequence[Any] = ()
        if (connection.scalar(select(func.max(metrics.c.seq))) or 0) > position.metric:
            newer = select(metrics).where(metrics.c.run_id == run_id, metrics.c.seq > position.metric)
            rows = connection.execute(newer.order_by(metrics.c.seq)).all()
        said = connection.execute(
            select(events)
            .where(events.c.run_id == run_id, events.c.seq > position.event)
            .order_by(events.c.seq)
        ).all()
    reached = Position(
        rows[-1].seq if rows else position.metric,
        rows[-1].created_at if rows else position.written_at,
        said[-1].seq if said else position.event,
    )
    return Changes(reached, [metric_of(row) for row in rows], [event_of(row) for row in said], run, count)


def _holds(connection: Connection, run_id: str, position: Position) -> bool:
    if not position.metric:
        return True
    of = metrics.c
    written_at = connection.scalar(
        select(of.created_at).where(of.seq == position.metric, of.run_id == run_id)
    )
    return written_at == position.written_at
