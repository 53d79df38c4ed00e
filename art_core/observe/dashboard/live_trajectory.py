"""Following a rollout that is still running: its page is told when there is more to see.

Invariant: a message's id says what the rollout had by then, so that a page that comes back, or that was made
before the message, is told whenever that is not all.

Nothing of the rollout is in a message: its page fetches itself again, and takes what is new.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Request
from sse_starlette import EventSourceResponse, ServerSentEvent

from art_core.errors import StoreError
from art_core.observe.dashboard.live import INTERVAL, RETRY
from art_core.observe.dashboard.page import site_of
from art_core.store import Store
from art_core.store.browse import trajectory_row
from art_core.store.rows import TrajectoryRow
from art_core.types import RolloutStatus

router = APIRouter()


def sign_of(row: TrajectoryRow) -> str:
    """What a rollout has by now: its status and how many calls."""
    return f"{row.status}~{row.steps}"


@router.get("/trajectories/{trajectory_id:path}/live")
async def live(
    request: Request,
    trajectory_id: str,
    after: str = "",
    last_event_id: Annotated[str | None, Header()] = None,
) -> EventSourceResponse:
    """A message whenever a rollout has more than its page shows; the last one is that it has ended."""
    store = site_of(request).store
    await asyncio.to_thread(trajectory_row, store, trajectory_id)
    return EventSourceResponse(
        _follow(store, trajectory_id, last_event_id or after),
        ping=15,
        headers={"cache-control": "no-store"},
        sep="\n",
    )


async def _follow(store: Store, trajectory_id: str, sign: str) -> AsyncIterator[ServerSentEvent]:
    yield ServerSentEvent(comment="following", retry=RETRY)
    while True:
        try:
            row = await asyncio.to_thread(trajectory_row, store, trajectory_id)
        except StoreError as unreadable:  # such as a disk that is full for a while
            yield ServerSentEvent(event="problem", data=json.dumps(str(unreadable)))
            return
        ended = row.status != RolloutStatus.RUNNING
        if sign_of(row) != sign or ended:
            sign = sign_of(row)
            said = {"status": str(row.status), "calls": row.steps}
            yield ServerSentEvent(event="change", data=json.dumps(said), id=sign)
        if ended:
            return
        await asyncio.sleep(INTERVAL)
