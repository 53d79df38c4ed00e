"""What people say of trajectories, from the forms on their pages.

Invariant: only a request that a page of this very server made is heard, and only where writing was asked for;
feedback is kept whole or refused by name, and never changes a reward.
"""

import secrets
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art_core.errors import ArtError, RewardError, UnknownTrajectoryError
from art_core.observe.dashboard.page import site_of

router = APIRouter()

MOST_BYTES = 30_000
"""Of a request that holds feedback."""


class Given(BaseModel):
    """One form, filled in.

    ``value`` is as `art_core.store.FeedbackKind` says; of a choice also 0: the other one is better.
    """

    model_config = ConfigDict(extra="forbid")

    trajectory_id: str = Field(min_length=1, max_length=500)
    kind: Literal["thumb", "score", "choice"]
    value: float
    author: str = Field(min_length=1, max_length=100)
    comment: str = Field(default="", max_length=4000)
    over: str | None = Field(default=None, max_length=500)


@router.post("/feedback")
async def give(request: Request, x_art_control: Annotated[str, Header()] = "") -> JSONResponse:
    """Keep feedback: a JSON object as `Given` says.

    The header ``X-ART-Control`` carries the token of the page. Other sites cannot send that header, nor read
    the token.
    """
    site = site_of(request)
    if not site.control:
        return _refused(403, "this dashboard is read-only; start it with --control to give feedback")
    if not secrets.compare_digest(x_art_control.encode(), site.token.encode()):
        return _refused(
            403, "the page is older than its server, or this request is none of its own; reload it"
        )
    body = await request.body()
    if len(body) > MOST_BYTES:
        return _refused(413, f"{len(body)} bytes: more than any feedback takes")
    try:
        given = Given.model_validate_json(body)
    except ValidationError as unusable:
        named = {".".join(map(str, e["loc"])): e["msg"] for e in unusable.errors()}
        return JSONResponse({"errors": {k: f"{k}: {v}" for k, v in named.items()}}, status_code=422)
    better, over, value = given.trajectory_id, given.over, given.value
    if given.kind == "choice" and value == 0 and over is not None:
        better, over, value = over, better, 1.0
    try:
        site.store.add_feedback(
            better, kind=given.kind, value=value, author=given.author, comment=given.comment, over=over
        )
    except UnknownTrajectoryError as unknown:
        return _refused(404, str(unknown))
    except RewardError as refused:
        return _refused(422, str(refused))
    except ArtError as failed:
        return _refused(503, str(failed))
    return JSONResponse({"said": f"Kept: {_said(given.kind, value)} by {given.author}"})


def _said(kind: str, value: float) -> str:
    if kind == "thumb":
        return "thumb up" if value > 0 else "thumb down"
    if kind == "score":
        return f"score {value:g}"
    return "a choice" if value == 1 else "a tie"


def _refused(status: int, message: str) -> JSONResponse:
    return JSONResponse({"errors": {"": message}}, status_code=status)
