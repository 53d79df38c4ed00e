"""Following a run: its series at once, and what is added to them as server-sent events.

Invariant: each message carries the position that it leads to as its id, so a page that comes back with the
id of its last message (the browser does so by itself) is told everything since, by this server or the next.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse
from sqlalchemy import Connection, select
from sse_starlette import EventSourceResponse, ServerSentEvent

from art_core.errors import StoreError
from art_core.observe.dashboard.happenings import event_view
from art_core.observe.dashboard.page import site_of
from art_core.observe.dashboard.series import (
    Changes,
    Position,
    Series,
    changes_since,
    last_step,
    position_of,
    read_run,
    read_series,
    sampled_series,
)
from art_core.observe.dashboard.standing import Standing, standing
from art_core.observe.signs import LATELY, READ, Sign, signs_of
from art_core.store import Store
from art_core.store.reading import event_of, read_lineage
from art_core.store.records import Run
from art_core.store.schema import events

router = APIRouter()

INTERVAL = 0.5
"""Seconds between two looks at the store."""

RETRY = 1000
"""Milliseconds after which a browser that lost the server asks again."""

MOST_NAMES = 400


@router.get("/runs/{run_id}/series")
def series(
    request: Request, run_id: str, name: Annotated[list[str], Query(max_length=MOST_NAMES)]
) -> JSONResponse:
    """Some metrics of a run and of those that it continues, how it stands, and where to follow it from."""
    with site_of(request).store.read() as connection:
        now = standing(connection, read_run(connection, run_id))
        line = read_lineage(connection, run_id)
        began = read_run(connection, line[0]).started_at
        found = read_series(connection, line, name)
        position = position_of(connection, run_id)
    return JSONResponse(
        {
            "started_at": began,
            "word": now.word,
            "tone": now.tone,
            "going": now.going,
            "position": str(position),
            "series": {name: columns(one) for name, one in found.items()},
        }
    )


def columns(one: Series) -> dict[str, Sequence[Any]]:
    """A series as JSON."""
    return {"steps": one.steps, "values": one.values, "times": one.times}


@router.get("/runs/{run_id}/live")
async def live(
    request: Request,
    run_id: str,
    after: str = "",
    last_event_id: Annotated[str | None, Header()] = None,
) -> EventSourceResponse:
    """What comes after a position, as it comes."""
    store = site_of(request).store
    position = Position.parse(last_event_id or after) if last_event_id or after else Position()
    await asyncio.to_thread(_check, store, run_id)
    return EventSourceResponse(
        _follow(store, run_id, position), ping=15, headers={"cache-control": "no-store"}, sep="\n"
    )


def _check(store: Store, run_id: str) -> None:
    with store.read() as connection:
        read_run(connection, run_id)


async def _follow(store: Store, run_id: str, position: Position) -> AsyncIterator[ServerSentEvent]:
    told: object = None
    yield ServerSentEvent(comment="following", retry=RETRY)
    while True:
        try:
            changes, now, signs = await asyncio.to_thread(_look, store, run_id, position)
        except StoreError as unreadable:  # such as a disk that is full for a while
            yield ServerSentEvent(event="problem", data=json.dumps(str(unreadable)))
            return
        if changes.again:
            yield ServerSentEvent(event="again", data="{}")
            return
        standing_now = (now.word, changes.trajectories, changes.run.ended_at)
        if changes.metrics or changes.events or told != standing_now:
            told = standing_now
            position = changes.position
            data = json.dumps(_message(changes, now, signs), allow_nan=False)
            yield ServerSentEvent(event="change", data=data, id=str(position))
        await asyncio.sleep(INTERVAL)


def _look(store: Store, run_id: str, position: Position) -> tuple[Changes, Standing, list[Sign]]:
    changes = changes_since(store, run_id, position)
    with store.read() as connection:
        now = standing(connection, changes.run)
        return changes, now, read_signs(connection, run_id, now)


def read_signs(connection: Connection, run_id: str, now: Standing) -> list[Sign]:
    """What stands out in a run now."""
    line = read_lineage(connection, run_id)
    found = sampled_series(connection, line, READ, last_step(connection, line), lately=LATELY)
    kinds = ("training_stopped", "training_resumed")
    acts = select(events).where(events.c.run_id == run_id, events.c.kind.in_(kinds)).order_by(events.c.seq)
    told = [event_of(row) for row in connection.execute(acts)]
    return signs_of({name: one.curve for name, one in found.items()}, told, now)


_SEE = {
    "groups_without_spread": ("These groups", "/groups?run_id={run}&spread=none"),
    "trajectories_failed": ("These rollouts", "/trajectories?run_id={run}&status=failed"),
    "updates_skipped": ("Events", "#events-title"),
    "success_rate": ("Audit rewards", "/runs/{run}/audit"),
}


def sign_view(sign: Sign, run_id: str) -> dict[str, str]:
    """What stands out as a page shows it: with a way to what it is about, where there is one."""
    words, address = _SEE.get(sign.about, ("", ""))
    return sign.as_dict() | {"see": words, "href": address.format(run=quote(run_id, safe=""))}


def _message(changes: Changes, now: Standing, signs: Sequence[Sign]) -> dict[str, Any]:
    return {
        "metrics": [
            [m.name, m.step, m.value if math.isfinite(m.value) else None, m.created_at]
            for m in changes.metrics
        ],
        "events": [event_view(event) for event in changes.events],
        "run": run_view(changes.run, now, changes.trajectories),
        "signs": [sign_view(sign, changes.run.id) for sign in signs],
    }


def run_view(run: Run, now: Standing, trajectories: int) -> dict[str, Any]:
    """What the head of a run's page says and what may change."""
    return {
        "word": now.word,
        "tone": now.tone,
        "going": now.going,
        "trajectories": trajectories,
        "last_sign": now.last_sign,
        "ended_at": run.ended_at,
    }
