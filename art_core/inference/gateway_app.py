"""The gateway's routes.

Invariant: every answer that is not a server's own is JSON, errors in OpenAI's form, and says what to do.

========================================== ==============================================================
``POST /v1/chat/completions, /v1/completions`` passed on; the completion is kept under its key
``POST /rollouts/<id>/v1/...``             the same, recorded as steps of the rollout
``GET /v1/models``                         passed on
``GET /health``                            how each replica is: 200 while one answers, else 503
``GET /metrics``                           counts, for Prometheus
``POST /rollouts``                         start a rollout: ``{"scenario": {"id", "inputs"}, "group"}``
``POST /rollouts/<id>/end``                end it: ``{"reward": 1.0}`` or ``{"failure": {"message"}}``
``GET /rollouts/<id>``                     the trajectory
``GET /captures/<key>``                    hand out a completion, once
========================================== ==============================================================
"""

import asyncio
import hmac
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from art_core.errors import CaptureError, RewardError
from art_core.inference.gateway_log import RecordedElsewhereError
from art_core.inference.gateway_proxy import Proxy
from art_core.inference.gateway_reply import send_refusal
from art_core.inference.gateway_routing import ReplicaState
from art_core.inference.gateway_sessions import EndRollout, NewRollout, Sessions, trajectory_json
from art_core.inference.gateway_upstream import RefusalError, forwarded

BodyT = TypeVar("BodyT", bound=BaseModel)

PREFIX = "/rollouts/{rollout_id}"

COMPLETIONS = ("/chat/completions", "/completions")
"""What is passed on and captured, below ``/v1``."""

_CALL = re.compile(rf"(?:/rollouts/([^/]+))?/v1({'|'.join(COMPLETIONS)})")

_ELSEWHERE = {
    "/v1/messages": "Anthropic's Messages API is not served here: use POST /v1/chat/completions "
    "(with LangChain: ChatOpenAI or ChatART in place of ChatAnthropic)",
    "/v1/responses": "OpenAI's Responses API is not served here: use POST /v1/chat/completions (with "
    "LangChain: ChatOpenAI(use_responses_api=False); with the openai client: client.chat.completions.create)",
}


class GatewayApp:
    """The ASGI application.

    Args:
        proxy: passes completions on.
        sessions: the rollouts behind the prefixes.
        api_key: demanded as the bearer token; None demands none.
    """

    def __init__(self, proxy: Proxy, sessions: Sessions, *, api_key: str | None = None) -> None:
        self._proxy = proxy
        self._sessions = sessions
        self._api_key = api_key
        self._app = Starlette(
            routes=self._routes(), exception_handlers={RefusalError: _refused, 404: _no_route, 405: _no_route}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and scope["path"] != "/health" and not self._known(Headers(scope=scope)):
            await send_refusal(send, RefusalError(401, "this gateway wants its api_key as the bearer token"))
            return
        called = _CALL.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if called is not None and scope["method"] == "POST":
            await self._complete(called, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _complete(self, called: re.Match[str], scope: Scope, receive: Receive, send: Send) -> None:
        # Not through Starlette: routing and middleware cost as much as all else that is done for a call.
        rollout_id, path = called.groups()
        try:
            keep = None if rollout_id is None else self._sessions.admit(rollout_id)
        except RefusalError as refusal:
            await send_refusal(send, refusal)
            return
        await self._proxy.serve(path, scope, receive, send, keep, rollout_id)

    def _known(self, headers: Headers) -> bool:
        if self._api_key is None:
            return True
        given = headers.get("authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self._api_key}".encode())

    def _routes(self) -> list[BaseRoute]:
        routes: list[BaseRoute] = [
            Route("/v1/models", self._models, methods=["GET"]),
            Route(f"{PREFIX}/v1/models", self._models, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/rollouts", self._start, methods=["POST"]),
            Route(f"{PREFIX}/end", self._end, methods=["POST"]),
            Route(PREFIX, self._show, methods=["GET"]),
            Route("/captures/{key}", self._capture, methods=["GET"]),
        ]
        for path in COMPLETIONS:
            for prefix in ("", PREFIX):
                routes.append(Route(f"{prefix}/v1{path}", _only_post))
        for path, hint in _ELSEWHERE.items():
            for prefix in ("", PREFIX):
                routes.append(Route(f"{prefix}{path}", _refuse(hint), methods=["POST", "GET"]))
        return routes

    async def _models(self, request: Request) -> Response:
        answer = await self._proxy.upstream.get("/v1/models", request.headers)
        return Response(answer.content, answer.status_code, forwarded(answer.headers))

    async def _health(self, request: Request) -> Response:
        upstream = self._proxy.upstream
        replicas = await upstream.health()
        up = sum(replica["state"] == ReplicaState.UP for replica in replicas)
        says: dict[str, Any] = {"status": "ok" if up == len(replicas) else "degraded" if up else "down"}
        if self._known(request.headers):  # load balancers that know no key get the verdict alone
            endpoint = upstream.endpoint
            says["current_version"] = None if endpoint is None else endpoint.current_version().name
            says |= {"queued": upstream.queued, "replicas": replicas}
        return _json(says, 200 if up else 503)

    async def _metrics(self, _: Request) -> Response:
        exposition = await asyncio.to_thread(self._proxy.metrics.exposition)
        return Response(exposition, headers={"content-type": CONTENT_TYPE_LATEST})

    async def _start(self, request: Request) -> Response:
        rollout = self._sessions.create(await _read(request, NewRollout))
        base_url = f"{str(request.base_url).rstrip('/')}/rollouts/{rollout.id}/v1"
        return _json({"id": rollout.id, "base_url": base_url}, 201)

    async def _end(self, request: Request) -> Response:
        asked = await _read(request, EndRollout)
        try:
            ended = await self._sessions.end(request.path_params["rollout_id"], asked)
        except RewardError as wrong:
            raise RefusalError(400, str(wrong)) from wrong
        return Response(trajectory_json(ended), media_type="application/json")

    async def _show(self, request: Request) -> Response:
        rollout = self._sessions.find(request.path_params["rollout_id"])
        return Response(trajectory_json(rollout.snapshot()), media_type="application/json")

    async def _capture(self, request: Request) -> Response:
        try:
            found = self._proxy.log.take(request.path_params["key"])
        except RecordedElsewhereError as recorded:
            raise RefusalError(409, str(recorded)) from recorded
        except CaptureError as missing:
            raise RefusalError(404, str(missing)) from missing
        return Response(found.to_json(), media_type="application/json")


async def _only_post(request: Request) -> Response:
    raise RefusalError(405, f"{request.url.path} takes POST, not {request.method}")


def _refuse(message: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise RefusalError(404, message)

    return refuse


async def _refused(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, RefusalError)
    return Response(refusal.body, refusal.status, refusal.headers)


async def _no_route(request: Request, _: Exception) -> Response:
    refusal = RefusalError(
        404,
        f"no such route: {request.method} {request.url.path}; here are POST /v1/chat/completions, "
        "POST /v1/completions, GET /v1/models, GET /health, GET /metrics, POST /rollouts, "
        "GET /captures/<key>",
    )
    return Response(refusal.body, refusal.status, refusal.headers)


async def _read(request: Request, kind: type[BodyT]) -> BodyT:
    try:
        return kind.model_validate_json(await request.body() or b"{}")
    except ValidationError as wrong:
        mistakes = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in wrong.errors())
        raise RefusalError(400, f"{request.url.path}: {mistakes}") from wrong


def _json(data: Any, status: int = 200) -> Response:
    return Response(json.dumps(data), status, media_type="application/json")
