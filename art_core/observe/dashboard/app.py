"""The dashboard's application.

Invariant: every answer forbids what the pages do not need (scripts of others, inline scripts, frames, other
hosts), an error of ours is a page that says what to do, and HEAD is answered as GET is, without the body.
"""

import secrets
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_core.errors import ArtError, ConfigError, StoreError, UnknownRunError, UnknownTrajectoryError
from art_core.observe.dashboard import (
    feedback_forms,
    knob_control,
    live,
    live_trajectory,
    pages_audit,
    pages_groups,
    pages_runs,
    pages_scenarios,
    pages_trajectories,
    pages_tree,
)
from art_core.observe.dashboard.page import HERE, Site, make_templates, render
from art_core.store import Store

PAGES = (
    pages_runs,
    live,
    knob_control,
    pages_audit,
    pages_tree,  # before groups, whose addresses take any rest
    pages_groups,
    live_trajectory,  # before trajectories, whose addresses take any rest, too
    pages_trajectories,
    pages_scenarios,
    feedback_forms,
)
"""Modules of this package that have pages, each a ``router``."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",  # Plotly writes a style sheet of its own
        "img-src 'self' data: blob:",  # pictures that Plotly saves
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
"""What a page may load, and from where (Content Security Policy level 3)."""

_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_FOR_EVER = "public, max-age=31536000, immutable"


def create_app(store: Store, *, control: bool = False, hosts: Sequence[str] | None = None) -> FastAPI:
    """The dashboard of a project.

    Args:
        store: what it shows; the caller closes it.
        control: whether the live knobs of a run can be turned on its page.
        hosts: names by which it may be addressed, against DNS rebinding; None: any.
    """
    app = FastAPI(title=f"{store.project}: art-langgraph", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.site = Site(store, control, secrets.token_urlsafe(24), make_templates())
    if hosts is not None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    app.add_middleware(_Headers)
    app.add_middleware(_Head)
    app.mount("/static", StaticFiles(directory=HERE / "static"), name="static")
    app.add_api_route("/vendor/plotly.min.js", _plotly)
    for module in PAGES:
        app.include_router(module.router)
    app.add_exception_handler(ArtError, _ours)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(RequestValidationError, _unreadable)
    return app


def _plotly() -> FileResponse:
    # Found, not imported: importing Plotly takes as long as everything else together.
    spec = find_spec("plotly")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("curves need plotly: pip install 'art-langgraph[serve]'")
    path = Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    return FileResponse(path, media_type="text/javascript")


def _ours(request: Request, error: Exception) -> Response:
    if isinstance(error, (UnknownTrajectoryError, UnknownRunError)):
        return _problem(request, 404, "Not found", str(error))
    if isinstance(error, StoreError):
        return _problem(request, 503, "The record cannot be read", str(error))
    return _problem(request, 400, "This cannot be shown", str(error))


def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    titles = {404: "Not found", 403: "Not allowed", 405: "Not allowed"}
    title = titles.get(error.status_code, "This did not work")
    detail = "There is no such page." if error.detail == "Not Found" else str(error.detail)
    return _problem(request, error.status_code, title, detail)


def _unreadable(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = "; ".join(
        f"{'.'.join(str(part) for part in e['loc'][1:])}={e.get('input')!r}: {e['msg']}"
        for e in error.errors()
    )
    return _problem(request, 422, "The address cannot be read", found)


def _problem(request: Request, status: int, title: str, message: str) -> HTMLResponse:
    return render(request, "problem.html", status_code=status, title=title, message=message)


class _Headers:
    """Adds the headers that every answer has; files whose address names their version are kept for ever."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        versioned = scope["path"].startswith(("/static/", "/vendor/")) and b"v=" in scope["query_string"]

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                kept = versioned and message["status"] == 200
                headers.setdefault("cache-control", _FOR_EVER if kept else "no-cache")
            await send(message)

        await self._app(scope, receive, with_headers)


class _Head:
    """Answers HEAD as GET, without the body (RFC 9110, 9.3.2); what streams ends with its headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def head_alone(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                # The answer is whole: whoever streams is told that the client has left.
                await send({"type": "http.response.body", "body": b""})

        await self._app({**scope, "method": "GET"}, receive, head_alone)
