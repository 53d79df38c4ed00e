"""A vLLM server without a model: real HTTP on loopback, scripted answers, exact token ids, faults on demand.

Answers and their token ids are those of `replies`.

It runs on its own thread and event loop. HTTP/1.1 is spoken by hand: that keeps it quick enough for
benchmarks, and lets a fault cut a connection at any byte.
"""

import asyncio
import base64
import json
import math
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

from fakes.replies import (
    END,
    GENERATE,
    Reply,
    Script,
    Scripted,
    ToolCall,
    as_reply,
    completion_ids,
    decode,
    deltas,
    encode,
    logprob,
    logprob_entry,
    prompt_ids,
    prompt_text,
    wire_call,
)

__all__ = [
    "END",
    "FAULTS",
    "GENERATE",
    "FakeVLLM",
    "Reply",
    "ToolCall",
    "completion_ids",
    "decode",
    "encode",
    "logprob",
    "prompt_ids",
    "prompt_text",
]

FAULTS = ("drop", "stall", "429", "500", "garbage", "cut_stream")
"""Kinds: closed without an answer, never answered, refused, broken, not JSON, cut in the middle."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One request as the server received it."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    at: float


@dataclass(slots=True)
class _Faults:
    rate: float
    kinds: tuple[str, ...]
    random: random.Random
    times: int | None

    def draw(self) -> str | None:
        if self.times == 0 or self.random.random() >= self.rate:
            return None
        self.times = None if self.times is None else self.times - 1
        return self.random.choice(self.kinds)


class _Cut(Exception):
    """The connection is to be closed at once."""


class FakeVLLM:
    """The server; a context manager.

    Args:
        reply: a text, a `Reply`, a list of answers to give in order (then 500), or a function of the
            request. A list of replies from the function makes the choices of ``n``.
        models: names served; None: any name, as ``name@n`` with adapters loaded.
        latency: seconds before each answer.
        chunk_tokens: tokens in each chunk of a stream.
        chunk_delay: seconds between chunks.
        token_ids: whether ``return_token_ids`` is understood.
        logprobs: whether ``logprobs`` is understood.
        tempered_logprobs: whether the likeliest token's logprob depends on the temperature.
        usage: whether answers carry token counts.
        null_logprobs: positions whose logprob is sent as null.
        nan_logprobs: positions whose logprob is sent as NaN.
        reasoning_field: ``reasoning_content`` or ``reasoning`` (vLLM's newer name).
        packed: whether tokens are packed for clients that read them so, as by the plugin of ours.
        port: to listen on, shared with others that allow it, as vLLM does; 0 for any free one.
    """

    def __init__(
        self,
        reply: Scripted | Script | None = None,
        *,
        models: Sequence[str] | None = None,
        latency: float = 0.0,
        chunk_tokens: int = 4,
        chunk_delay: float = 0.0,
        token_ids: bool = True,
        logprobs: bool = True,
        tempered_logprobs: bool = True,
        usage: bool = True,
        null_logprobs: Sequence[int] = (),
        nan_logprobs: Sequence[int] = (),
        reasoning_field: str = "reasoning_content",
        packed: bool = False,
        port: int = 0,
    ) -> None:
        self.models = models
        self.latency = latency
        self.chunk_tokens = chunk_tokens
        self.chunk_delay = chunk_delay
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.tempered_logprobs = tempered_logprobs
        self.usage = usage
        self.null_logprobs = tuple(null_logprobs)
        self.nan_logprobs = tuple(nan_logprobs)
        self.reasoning_field = reasoning_field
        self.packed = packed
        self.requests: list[Answered] = []
        self.faults: Counter[str] = Counter()
        self.open_connections = 0
        self.max_connections = 0
        self.port = port
        self._script = self._as_script("ok" if reply is None else reply)
        self._failing: _Faults | None = None
        self._released = threading.Event()
        self._released.set()
        self._ids = 0
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._started = threading.Event()

    # -- what tests use ----------------------------------------------------------------------------

    @property
    def base_url(self) -> str:
        """Ending in ``/v1``."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The bodies of the completion requests received, in order of arrival."""
        return [r.body for r in self.requests if r.path.endswith("completions")]

    def script(self, reply: Scripted | Script) -> None:
        """Answer like this from now on."""
        self._script = self._as_script(reply)

    def fail(
        self, rate: float, kinds: Sequence[str] = FAULTS, seed: int = 0, *, times: int | None = None
    ) -> None:
        """Fail this share of the completion requests from now on; 0 stops it. Counted in ``faults``.

        ``times`` stops it after so many failures.
        """
        unknown = set(kinds) - set(FAULTS)
        if unknown:
            raise ValueError(f"no such faults: {sorted(unknown)}; known: {FAULTS}")
        self._failing = _Faults(rate, tuple(kinds), random.Random(seed), times) if rate else None

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, requests come in and no answer ends: of a stream only the first text is sent.

        So a test can look at what goes on meanwhile, on a machine of any speed.
        """
        self._released.clear()
        try:
            yield
        finally:
            self._released.set()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="fake-vllm", daemon=True
        )
        self._thread.start()
        if not self._started.wait(60):
            raise RuntimeError("the fake server did not start within 60 s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None and self._stopping is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(10)

    # -- answers -----------------------------------------------------------------------------------

    @staticmethod
    def _as_script(reply: Scripted | Script) -> Script:
        if callable(reply):
            return reply
        if isinstance(reply, list):
            queue = list(reply)
            lock = threading.Lock()

            def next_one(request: dict[str, Any]) -> Scripted:
                with lock:
                    if not queue:
                        raise LookupError("the script has no more answers")
                    return queue.pop(0)

            return next_one
        return lambda request: reply

    def _choices(self, request: dict[str, Any]) -> list[Reply]:
        scripted = self._script(request)
        one = isinstance(scripted, str | Reply | ToolCall)
        replies = [scripted] if one else list(scripted)  # type: ignore[list-item]
        count = int(request.get("n") or 1)
        if len(replies) < count:
            replies = [replies[i % len(replies)] for i in range(count)]
        return [self._limited(as_reply(r), request) for r in replies[:count]]

    def _limited(self, reply: Reply, request: Mapping[str, Any]) -> Reply:
        """The reply after ``stop`` and ``max_tokens``, with its ids, logprobs and finish reason settled."""
        stops = request.get("stop") or ()
        for stop in (stops,) if isinstance(stops, str) else stops:
            if stop in reply.text:
                reply = replace(reply, text=reply.text.split(stop)[0], tool_calls=())
        ids = reply.tokens if reply.tokens is not None else (*encode(reply.rendered), END)
        finish = reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop")
        limit = request.get("max_completion_tokens") or request.get("max_tokens")
        if limit and len(ids) > limit:
            ids, finish = ids[:limit], "length"
            text, thought = decode(ids), None
            if reply.reasoning is not None:
                thought, _, text = text.removeprefix("<think>").partition("</think>")
            reply = replace(reply, text=text, tool_calls=(), reasoning=thought)
        values = reply.logprobs
        if values is None:
            values = tuple(
                None if i in self.null_logprobs else math.nan if i in self.nan_logprobs else logprob(t, i)
                for i, t in enumerate(ids)
            )
        return replace(reply, tokens=ids, logprobs=values, finish_reason=finish)

    def _message(self, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None, "tool_calls": []}
        if reply.reasoning is not None:
            message[self.reasoning_field] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [wire_call(c, i) for i, c in enumerate(reply.tool_calls)]
        elif not reply.text:
            message["content"] = ""
        return message

    def _logprobs_json(
        self, request: Mapping[str, Any], reply: Reply, start: int = 0, end: int | None = None
    ) -> str:
        pairs = zip((reply.tokens or ())[start:end], (reply.logprobs or ())[start:end], strict=False)
        likeliest = None
        if request.get("top_logprobs"):
            likeliest = -0.5 * (request.get("temperature", 1) if self.tempered_logprobs else 1)
        count = int(request.get("top_logprobs") or 0)
        return '{"content": [' + ", ".join(logprob_entry(t, p, likeliest, count) for t, p in pairs) + "]}"

    def _packs(self, request: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
        asked = request.get("return_token_ids") and request.get("logprobs")
        return bool(self.packed and asked and headers.get("x-art-tokens") == "packed")

    def _packed(self, prompt: Sequence[int], choices: Sequence[Reply]) -> dict[str, Any]:
        def numbers(kind: str, values: Sequence[Any]) -> str:
            return base64.b64encode(struct.pack(f"<{len(values)}{kind}", *values)).decode()

        tokens = [
            {
                "index": index,
                "ids": numbers("i", reply.tokens or ()),
                "logprobs": numbers("f", [math.nan if p is None else p for p in reply.logprobs or ()]),
            }
            for index, reply in enumerate(choices)
        ]
        return {"prompt": numbers("i", prompt), "choices": tokens}

    def _usage(self, prompt: Sequence[int], choices: Sequence[Reply]) -> dict[str, int]:
        sampled = sum(len(c.tokens or ()) for c in choices)
        return {
            "prompt_tokens": len(prompt),
            "completion_tokens": sampled,
            "total_tokens": len(prompt) + sampled,
        }

    def _head(self, request: Mapping[str, Any], kind: str) -> dict[str, Any]:
        self._ids += 1
        return {
            "id": f"chatcmpl-{self._ids}",
            "object": kind,
            "created": int(time.time()),
            "model": request.get("model"),
        }

    def _chat(self, request: dict[str, Any], choices: Sequence[Reply], *, packs: bool = False) -> bytes:
        prompt = prompt_ids(request)
        if packs:
            request = {**request, "return_token_ids": None, "logprobs": None}
        wants_ids = self.token_ids and request.get("return_token_ids")
        wants_logprobs = self.logprobs and request.get("logprobs")
        parts: list[str] = []
        for index, reply in enumerate(choices):
            choice: dict[str, Any] = {
                "index": index,
                "message": self._message(reply),
                "finish_reason": reply.finish_reason,
                "stop_reason": None,
            }
            if wants_ids:
                choice["token_ids"] = reply.tokens
            logprobs = self._logprobs_json(request, reply) if wants_logprobs else "null"
            parts.append(f'{json.dumps(choice)[:-1]}, "logprobs": {logprobs}}}')
        body = self._head(request, "chat.completion")
        if self.usage:
            body["usage"] = self._usage(prompt, choices)
        if wants_ids:
            body["prompt_token_ids"] = prompt
        if packs:
            body["art_tokens"] = self._packed(prompt, choices)
        return f'{json.dumps(body)[:-1]}, "choices": [{", ".join(parts)}]}}'.encode()

    def _text(self, request: dict[str, Any], choices: Sequence[Reply]) -> bytes:
        prompt = prompt_ids(request)
        body = self._head(request, "text_completion")
        body["choices"] = []
        for index, reply in enumerate(choices):
            choice: dict[str, Any] = {
                "index": index,
                "text": reply.rendered,
                "finish_reason": reply.finish_reason,
                "logprobs": None,
            }
            if self.token_ids and request.get("return_token_ids"):
                choice |= {"token_ids": reply.tokens, "prompt_token_ids": prompt}
            if self.logprobs and request.get("logprobs") is not None:
                choice["logprobs"] = {
                    "tokens": [decode((t,)) for t in reply.tokens or ()],
                    "token_logprobs": reply.logprobs,
                    "top_logprobs": None,
                    "text_offset": list(range(len(reply.tokens or ()))),
                }
            body["choices"].append(choice)
        if self.usage:
            body["usage"] = self._usage(prompt, choices)
        return json.dumps(body).encode()

    async def _let_go(self) -> None:
        while not self._released.is_set():
            await asyncio.sleep(0.005)

    async def _chat_stream(
        self, request: dict[str, Any], choices: Sequence[Reply], *, packs: bool = False
    ) -> AsyncIterator[bytes]:
        prompt = prompt_ids(request)
        if packs:
            request = {**request, "return_token_ids": None, "logprobs": None}
        head = self._head(request, "chat.completion.chunk")
        wants_ids = self.token_ids and request.get("return_token_ids")
        wants_logprobs = self.logprobs and request.get("logprobs")

        def chunk(index: int, delta: dict[str, Any], finish: str | None, extra: str, **top: Any) -> bytes:
            choice = {"index": index, "delta": delta, "finish_reason": finish}
            body = {**head, **top}
            choices_json = f"[{json.dumps(choice)[:-1]}{extra}}}]"
            return f'data: {json.dumps(body)[:-1]}, "choices": {choices_json}}}\n\n'.encode()

        top = {"prompt_token_ids": prompt} if wants_ids else {}
        for index in range(len(choices)):
            yield chunk(index, {"role": "assistant", "content": ""}, None, ', "logprobs": null', **top)
        for index, reply in enumerate(choices):
            ids = reply.tokens or ()
            pieces = deltas(reply, self.chunk_tokens, self.reasoning_field)
            for position, (start, end, delta) in enumerate(pieces):
                last = position == len(pieces) - 1
                if packs and not (delta or last):
                    continue  # such chunks are sent for their tokens alone
                extra = f', "token_ids": {json.dumps(ids[start:end])}' if wants_ids else ""
                logprobs = self._logprobs_json(request, reply, start, end) if wants_logprobs else "null"
                extra += f', "logprobs": {logprobs}'
                if self.chunk_delay:
                    await asyncio.sleep(self.chunk_delay)
                if position:
                    await self._let_go()
                yield chunk(index, delta, reply.finish_reason if last else None, extra)
        if self.usage and (request.get("stream_options") or {}).get("include_usage"):
            body = {**head, "choices": [], "usage": self._usage(prompt, choices)}
            yield f"data: {json.dumps(body)}\n\n".encode()
        if packs:
            body = {"object": head["object"], "choices": [], "art_tokens": self._packed(prompt, choices)}
            yield f"data: {json.dumps(body)}\n\n".encode()
        yield b"data: [DONE]\n\n"

    # -- HTTP --------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        connections: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            task.add_done_callback(connections.discard)
            await self._connection(reader, writer)

        shared = {"reuse_port": True} if self.port else {}
        server = await asyncio.start_server(
            connected, "127.0.0.1", self.port, backlog=4096, limit=2**20, **shared
        )
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        try:
            await self._stopping.wait()
        finally:
            server.close()
            for task in list(connections):
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open_connections += 1
        self.max_connections = max(self.max_connections, self.open_connections)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                request_line, *lines = head.decode("latin-1").split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (x.partition(":") for x in lines) if v}
                raw = await reader.readexactly(int(headers.get("content-length") or 0))
                method, path, _ = request_line.split(" ", 2)
                await self._respond(method, path.split("?")[0], headers, raw, reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError, _Cut):
            pass
        finally:
            self.open_connections -= 1
            writer.transport.abort()

    async def _respond(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        raw: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if not path.endswith("completions"):
            _send(writer, *self._plain(method, path, raw))
            return
        try:
            body: dict[str, Any] = json.loads(raw)
        except ValueError:
            _send(writer, 400, _error("the body is not JSON"))
            return
        self.requests.append(Answered(path, body, headers, time.time()))
        fault = self._failing.draw() if self._failing else None
        if fault == "cut_stream" and not body.get("stream"):
            fault = "drop"
        if fault:
            self.faults[fault] += 1
            if await self._fault(fault, reader, writer, streaming=bool(body.get("stream"))):
                return
        if self.models is not None and body.get("model") not in self.models:
            _send(writer, 404, _error(f"The model `{body.get('model')}` does not exist."))
            return
        try:
            choices = self._choices(body)
        except LookupError as exhausted:
            _send(writer, 500, _error(str(exhausted)))
            return
        wait = self.latency + max(c.delay for c in choices)
        if wait:
            await asyncio.sleep(wait)
        if not body.get("stream"):
            await self._let_go()
        packs = self._packs(body, headers)
        if not path.endswith("/chat/completions"):
            _send(writer, 200, self._text(body, choices))
        elif body.get("stream"):
            await self._stream(
                writer, self._chat_stream(body, choices, packs=packs), cut=fault == "cut_stream"
            )
        else:
            _send(writer, 200, self._chat(body, choices, packs=packs))

    async def _fault(
        self, kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, streaming: bool
    ) -> bool:
        """Do a fault; whether it took the answer's place (a cut stream starts as usual)."""
        if kind == "stall":
            await reader.read(1)  # returns when the client gives up
            raise _Cut
        if kind == "drop":
            raise _Cut
        if kind == "429":
            _send(writer, 429, _error("too many requests"))
        elif kind == "500":
            _send(writer, 500, _error("internal error"))
        elif kind == "garbage":
            broken = b'{"choices": [{"message": '
            _send(writer, 200, b"data: %b\n\n" % broken if streaming else broken)
        return kind != "cut_stream"

    def _plain(self, method: str, path: str, raw: bytes) -> tuple[int, bytes]:
        if path == "/health":
            return 200, b""
        if path == "/art/tokens" and self.packed:
            return 200, b'{"encoding": "packed", "detail": ""}'
        if path == "/v1/models":
            names = self.models or ()
            return 200, json.dumps(
                {"object": "list", "data": [{"id": n, "object": "model"} for n in names]}
            ).encode()
        return 404, _error(f"no such route: {method} {path}")

    async def _stream(self, writer: asyncio.StreamWriter, chunks: AsyncIterator[bytes], *, cut: bool) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        sent = 0
        async for chunk in chunks:
            if cut and sent == 2:
                await writer.drain()
                raise _Cut
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            sent += 1
            await writer.drain()
        writer.write(b"0\r\n\r\n")


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": None}}).encode()


def _send(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (status, HTTPStatus(status).phrase.encode(), len(body), body)
    )
