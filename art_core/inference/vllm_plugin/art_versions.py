"""Runs inside vLLM's API process: a door before its engine, and the name that merged weights answer to.

Invariant: a request is answered by the weights that its model name stands for, or refused: while the door is
shut none gets in, and weights change only when none is inside.

vLLM itself holds requests only inside its engine, where sleeping aborts them, and lets them go on the moment
that it wakes, before adapters that slept are what they were; and it fixes the names of its base model when it
starts, but merged weights are replaced while it runs.

`OneVersion` is an ASGI ``--middleware``. ``POST /art/version/hold`` shuts the door and answers when the last
request inside has ended; ``{"seconds": 60, "why": "..."}`` says how long who waits there waits, and what
they are then told (503). ``POST /art/version/release`` opens it; so does ``POST /art/version`` with
``{"names": [...]}``, which gives the base model new names first. Requests that waited are then judged by
vLLM itself, by the new names. Whoever steers the server says so in a header, and gets in. One API process
only.

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
RELEASE_PATH = "/art/version/release"

OWNER_HEADER = (b"x-art-owner", b"1")
"""Of requests by whoever shut the door: what is loaded or read while it is shut."""

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
        self._seconds: float | None = None
        self._why = ""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve the three paths of its own; let completions in while the door is open."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif scope["path"] == HOLD_PATH:
            await self._hold(await _body(receive), send)
        elif scope["path"] == RELEASE_PATH:
            await self._open()
            await _answer(send, 200, {"held": False})
        elif scope["path"] == VERSION_PATH:
            await self._rename(scope["app"].state, await _body(receive), send)
        elif not scope["path"].startswith("/v1/") or OWNER_HEADER in scope["headers"]:
            await self._app(scope, receive, send)  # steering, which happens while the door is shut
        else:
            await self._let_in(scope, receive, send)

    def _door(self) -> asyncio.Condition:
        if self._changed is None:  # it belongs to the loop that serves
            self._changed = asyncio.Condition()
        return self._changed

    async def _hold(self, body: bytes, send: Send) -> None:
        try:
            asked = json.loads(body or b"{}")
            seconds = None if asked.get("seconds") is None else float(asked["seconds"])
            why = str(asked.get("why", ""))
        except Exception as unreadable:
            await _refuse(send, 400, f"{type(unreadable).__name__}: {unreadable}")
            return
        door = self._door()
        async with door:
            self._shut, self._seconds, self._why = True, seconds, why
            await door.wait_for(lambda: not self._inside)
        await _answer(send, 200, {"held": True})

    async def _open(self) -> None:
        door = self._door()
        async with door:
            self._shut = False
            door.notify_all()

    async def _let_in(self, scope: Message, receive: Receive, send: Send) -> None:
        door = self._door()
        seconds, why = (self._seconds, self._why) if self._shut else (None, "")
        async with door:
            try:
                async with asyncio.timeout(seconds):
                    await door.wait_for(lambda: not self._shut)
            except TimeoutError:
                in_time = False
            else:
                in_time = True
                self._inside += 1
        if not in_time:
            await _refuse(send, 503, f"the request was held for {seconds:g} s: {why}")
            return
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
            await _refuse(send, 500, f"{type(unknown).__name__}: {unknown}")
            return
        renamed = []
        for name in names:
            one = copy.copy(first)
            one.name = name
            renamed.append(one)
        paths[:] = renamed  # one list, which all of vLLM's handlers look into
        logger.info("art: the base model is now called %s", ", ".join(names))
        await self._open()
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


async def _refuse(send: Send, status: int, message: str) -> None:
    """An error in OpenAI's form. Its clients would wait as long again if they were to try again."""
    error = {"message": message, "type": "server_error", "param": None, "code": status}
    await _answer(send, status, {"error": error}, (b"x-should-retry", b"false"))


async def _answer(send: Send, status: int, content: dict[str, Any], *more: tuple[bytes, bytes]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
