"""Runs inside vLLM's API process: the name that the one set of weights answers to, and a door before it.

Invariant: a request is answered by the weights that its model name stands for, or refused: while the door is
shut none gets in, and the name changes only when none is inside.

vLLM fixes the names of its base model when it starts, but merged weights are replaced while it runs.
`OneVersion` is an ASGI ``--middleware``. ``POST /art/version/hold`` shuts the door and answers when the last
request inside has ended; ``POST /art/version`` with ``{"names": [...]}`` gives the base model new names and
opens it. Requests that waited are then judged by vLLM itself, by the new names. One API process only.

This file alone is put on the server's path: it imports nothing of ours, and nothing of vLLM.
"""

import asyncio
import copy
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

logger = logging.getLogger("vllm.art")

VERSION_PATH = "/art/version"
HOLD_PATH = "/art/version/hold"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class OneVersion:
    """ASGI middleware, named on the command line: ``--middleware art_versions.OneVersion``."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._inside = 0
        self._changed: asyncio.Condition | None = None
        self._shut = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve the two paths of its own; let completions in while the door is open."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif scope["path"] == HOLD_PATH:
            await self._hold()
            await _answer(send, 200, {"held": True})
        elif scope["path"] == VERSION_PATH:
            await self._rename(scope["app"].state, await _body(receive), send)
        elif not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)  # steering, which happens while the door is shut
        else:
            await self._let_in(scope, receive, send)

    def _door(self) -> asyncio.Condition:
        if self._changed is None:  # it belongs to the loop that serves
            self._changed = asyncio.Condition()
        return self._changed

    async def _hold(self) -> None:
        door = self._door()
        async with door:
            self._shut = True
            await door.wait_for(lambda: not self._inside)

    async def _let_in(self, scope: Message, receive: Receive, send: Send) -> None:
        door = self._door()
        async with door:
            await door.wait_for(lambda: not self._shut)
            self._inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            async with door:
                self._inside -= 1
                door.notify_all()

    async def _rename(self, state: Any, body: bytes, send: Send) -> None:
        try:
            names = [str(name) for name in json.loads(body)["names"]]
            paths = state.openai_serving_models.base_model_paths
            first = paths[0]
        except Exception as unknown:
            await _answer(send, 500, {"error": {"message": f"{type(unknown).__name__}: {unknown}"}})
            return
        renamed = []
        for name in names:
            one = copy.copy(first)
            one.name = name
            renamed.append(one)
        paths[:] = renamed  # one list, which all of vLLM's handlers look into
        logger.info("art: the base model is now called %s", ", ".join(names))
        door = self._door()
        async with door:
            self._shut = False
            door.notify_all()
        await _answer(send, 200, {"names": names})


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
