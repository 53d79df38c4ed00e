"""Following a run: what was recorded since somebody last looked.

Invariant: nothing is told twice and nothing is left out, whichever process writes and however long nobody
looked: rows are told by their order of arrival, and a training step's numbers that are written again are told
again.
"""

from dataclasses import dataclass

from sqlalchemy import select

from art_core.errors import UnknownRunError
from art_core.store.reading import event_of, metric_of, read_runs
from art_core.store.records import Event, Metric, Run
from art_core.store.schema import events, metrics, runs
from art_core.store.store import Store


@dataclass(frozen=True, slots=True)
class Place:
    """How far somebody has read; the beginning by default."""

    metric: int = 0
    event: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What came since.

    Attributes:
        run: the run's record as it is now.
        metrics: in order of arrival.
        events: in order of arrival.
        successor: a newer run of the same model, if one has begun.
        place: where to go on from.
    """

    run: Run
    metrics: tuple[Metric, ...]
    events: tuple[Event, ...]
    successor: str | None
    place: Place


def news(store: Store, run_id: str, since: Place = Place()) -> News:
    """What was recorded of a run since a place.

    Raises:
        UnknownRunError: somebody has taken the run out of the record meanwhile.
    """
    numbers = select(metrics).where(metrics.c.run_id == run_id, metrics.c.seq > since.metric)
    happened = select(events).where(events.c.run_id == run_id, events.c.seq > since.event)
    with store.read() as connection:
        if not (there := read_runs(connection, runs.c.id == run_id)):
            raise UnknownRunError(f"{store.location} has no run {run_id} any more")
        run = there[0]
        own = select(runs.c.seq).where(runs.c.id == run_id).scalar_subquery()
        newer = select(runs.c.id).where(runs.c.model == run.model, runs.c.seq > own)
        successor = connection.scalar(newer.order_by(runs.c.seq.desc()).limit(1))
        counted = connection.execute(numbers.order_by(metrics.c.seq)).all()
        told = connection.execute(happened.order_by(events.c.seq)).all()
    return News(
        run=run,
        metrics=tuple(metric_of(row) for row in counted),
        events=tuple(event_of(row) for row in told),
        successor=successor,
        place=Place(
            max((r.seq for r in counted), default=since.metric),
            max((r.seq for r in told), default=since.event),
        ),
    )
