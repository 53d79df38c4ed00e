"""An HTTP client for completions that keeps what passes through it: OpenAI's SDK on top, any engine below.

Invariant: the SDK sends and gets what it would without capture, and an `Exchange` holds what the server
really said, also where the SDK then raises (an answer that does not parse was still sampled).

A request is bound to its exchange by a header, which never leaves this process: the SDK passes headers on
unchanged on every path (create, parse, stream, retries), where context variables would depend on who
iterates a stream, and in which task. In the transport the request gets its address, its policy version
and capture's extras; the answer is read once, kept, and handed on without what was not asked for.

Connections are bounded for each event loop, and for all threads together. A call that finds none free
waits for as long as its caller lets it: there is no timeout of its own.
"""

import asyncio
import json
import threading
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import openai

from art_core.capture import Asked, read_completion, request_extras, says_nothing, strip, usage_of
from art_core.errors import CaptureError
from art_core.recording import new_id
from art_core.streaming import DONE, Body, EventDecoder, StreamAssembler, shown

if TYPE_CHECKING:
    import httpx
else:
    # OpenAI's SDK stands on httpx (before 3.0) or on httpx2, which has the same API and is quicker there.
    _sdk = next(base for base in openai.DefaultHttpxClient.__mro__ if base.__name__ == "Client")
    httpx = import_module(_sdk.__module__.partition(".")[0])

HEADER = "x-art-exchange"

UNFINISHED = "the stream ended before the completion did"
"""The problem of a stream that was cut, or that its reader left."""

_under_way: "weakref.WeakValueDictionary[str, Exchange]" = weakref.WeakValueDictionary()


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


class Exchange:
    """One call on its way: where it goes, what was asked, and what came.

    Args:
        base_url: where the policy answers now, ending in ``/v1``.
        model: the name to send; None: the one that the request has.
        api_key: sent as the bearer token; None: what the request has.

    Attributes:
        request: the JSON body as the client meant it, under the name that was sent; None until it was.
        answer: what the server said, whole; None until then.
        problem: why there is no answer, as far as HTTP can tell.
        attempts: requests sent; more than one when the SDK retried.
        ended_at: `time.perf_counter` when the answer's last byte came.
    """

    def __init__(self, base_url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        self.id = new_id("x")
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.api_key = api_key
        self.request: Body | None = None
        self.answer: Body | None = None
        self.problem: str | None = None
        self.attempts = 0
        self.ended_at: float | None = None
        self._asked = Asked()
        _under_way[self.id] = self

    @property
    def headers(self) -> dict[str, str]:
        """What binds a request to this exchange."""
        return {HEADER: self.id}

    # -- the request -------------------------------------------------------------------------------

    def prepare(self, request: httpx.Request, body: bytes) -> None:
        """Make the request what is to go out."""
        self.attempts += 1
        self.answer = self.problem = None
        asked: dict[str, Any] = json.loads(body)
        if self.model is not None:
            asked["model"] = self.model
        self.request, self._asked = asked, Asked.of(asked)
        content = _compact({**asked, **request_extras(asked)})
        path = request.url.path
        request.url = httpx.URL(self.base_url + path[path.index("/v1") + 3 :])
        request.stream = httpx.ByteStream(content)
        headers = request.headers
        del headers[HEADER]
        headers["host"] = request.url.netloc.decode()
        headers["content-length"] = str(len(content))
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        # Waiting for a connection is back-pressure, not a fault.
        timeout = request.extensions.get("timeout")
        if timeout:
            request.extensions = {**request.extensions, "timeout": {**timeout, "pool": None}}

    # -- the answer --------------------------------------------------------------------------------

    def keep(self, status: int, raw: bytes) -> bytes:
        """Keep an answer that came whole; returns it as the client asked for it."""
        self.ended_at = time.perf_counter()
        if status != 200:
            self.problem = f"HTTP {status}: {raw[:500].decode(errors='replace')}"
            return raw
        try:
            body: Any = json.loads(raw)
        except ValueError:
            self.problem = f"the server's answer is not JSON: {shown(raw.decode(errors='replace'))}"
            return raw
        if not isinstance(body, dict):
            self.problem = f"the server's answer is no JSON object: {shown(body)}"
            return raw
        self.answer = body = cast(dict[str, Any], body)
        if not body.get("usage"):
            with suppress(CaptureError):  # said again, and recorded, when the answer is read
                body = {**body, "usage": usage_of(body, read_completion(body)) or None}
        return _compact(strip(body, self._asked))

    def streaming(self) -> "_StreamKeeper":
        """Keeps an answer that comes in chunks."""
        return _StreamKeeper(self, self._asked)

    def fail(self, error: BaseException) -> None:
        """The transport raised."""
        self.ended_at = time.perf_counter()
        self.problem = f"{type(error).__name__}: {error}".removesuffix(": ")


class _StreamKeeper:
    """Reads the events of one stream on their way to the client."""

    def __init__(self, exchange: Exchange, asked: Asked) -> None:
        self._exchange = exchange
        self._asked = asked
        self._events = EventDecoder()
        self._assembler = StreamAssembler()
        self._usage = False

    def take(self, piece: bytes) -> bytes:
        """Some bytes of the stream; returns what the client is to see of them."""
        return b"".join([self._pass(event) for event in self._events.feed(piece)])

    def end(self) -> bytes:
        """The stream has ended, or was closed by its reader."""
        rest = b"".join([self._pass(event) for event in self._events.close()])
        self._settle()
        return rest

    def broke(self, error: BaseException) -> None:
        """The connection broke."""
        if not self._assembler.complete:
            self._exchange.fail(error)
        self._settle()

    def _settle(self) -> None:
        exchange = self._exchange
        if exchange.problem is None and exchange.answer is None:
            exchange.ended_at = time.perf_counter()
            if self._assembler.complete:
                exchange.answer = self._assembler.body()
            else:
                exchange.problem = UNFINISHED

    def _pass(self, event: bytes) -> bytes:
        if event == DONE:
            return self._missing_usage() + b"data: [DONE]\n\n"
        try:
            chunk: Any = json.loads(event)
            self._assembler.feed(chunk)
        except (ValueError, CaptureError) as unreadable:
            reason = unreadable if isinstance(unreadable, CaptureError) else f"not JSON: {event[:200]!r}"
            self._exchange.problem = f"the stream cannot be read: {reason}"
            return b"data: %b\n\n" % event
        self._usage = self._usage or bool(chunk.get("usage"))
        seen = strip(chunk, self._asked)
        if says_nothing(seen):
            return b""
        return b"data: %b\n\n" % _compact(seen)

    def _missing_usage(self) -> bytes:
        """The chunk with token counts that was asked for and did not come, counted from the ids."""
        if self._usage or not self._asked.usage or not self._assembler.complete:
            return b""
        body = self._assembler.body()
        usage = usage_of(body, read_completion(body))
        if not usage:
            return b""
        chunk = {k: body[k] for k in ("id", "created", "model") if k in body}
        chunk |= {"object": "chat.completion.chunk", "choices": [], "usage": usage}
        return b"data: %b\n\n" % _compact(chunk)


# -- transports --------------------------------------------------------------------------------------


def _exchange_of(request: httpx.Request) -> Exchange | None:
    return _under_way.get(request.headers.get(HEADER, ""))


def _is_stream(response: httpx.Response) -> bool:
    return response.status_code == 200 and "event-stream" in response.headers.get("content-type", "")


_OUTDATED = frozenset({b"content-length", b"content-encoding", b"transfer-encoding"})


def _rewritten(response: httpx.Response, **content: Any) -> httpx.Response:
    headers = [(k, v) for k, v in response.headers.raw if k.lower() not in _OUTDATED]
    return httpx.Response(response.status_code, headers=headers, extensions=response.extensions, **content)


class _Kept(httpx.SyncByteStream):
    def __init__(self, response: httpx.Response, exchange: Exchange, slot: threading.Semaphore) -> None:
        self._response, self._exchange, self._slot = response, exchange, slot
        self._keeper = exchange.streaming()
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        try:
            for piece in self._response.iter_bytes():
                if seen := self._keeper.take(piece):
                    yield seen
        except Exception as broken:
            self._keeper.broke(broken)
            raise
        if rest := self._keeper.end():
            yield rest

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._keeper.end()
            self._response.close()
        finally:
            self._slot.release()


class _AsyncKept(httpx.AsyncByteStream):
    def __init__(self, response: httpx.Response, exchange: Exchange, slot: asyncio.Semaphore) -> None:
        self._response, self._exchange, self._slot = response, exchange, slot
        self._keeper = exchange.streaming()
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._response.aiter_bytes():
                if seen := self._keeper.take(piece):
                    yield seen
        except (Exception, asyncio.CancelledError) as broken:
            self._keeper.broke(broken)
            raise
        if rest := self._keeper.end():
            yield rest

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._keeper.end()
            await self._response.aclose()
        finally:
            self._slot.release()


class KeepingTransport(httpx.BaseTransport):
    """Sends requests and keeps the answers of those that belong to an exchange. Thread-safe.

    Args:
        max_connections: the most that are open at once.
        inner: what sends; None: a connection pool of its own.
    """

    def __init__(self, max_connections: int, inner: httpx.BaseTransport | None = None) -> None:
        self._slots = threading.BoundedSemaphore(max_connections)
        self._inner = inner or httpx.HTTPTransport(limits=_limits(max_connections))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; blocks while no connection is free."""
        exchange = _exchange_of(request)
        if exchange is None:
            return self._inner.handle_request(request)
        exchange.prepare(request, request.read())
        self._slots.acquire()
        held = True
        try:
            response = self._inner.handle_request(request)
            if _is_stream(response):
                held = False  # the stream gives it back when it is closed
                return _rewritten(response, stream=_Kept(response, exchange, self._slots))
            try:
                content = exchange.keep(response.status_code, response.read())
            finally:
                response.close()
            return _rewritten(response, content=content)
        except BaseException as broken:
            exchange.fail(broken)
            raise
        finally:
            if held:
                self._slots.release()

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()


class _LoopPool:
    """The connections of one event loop, closed when the loop shuts down."""

    def __init__(self, max_connections: int, inner: httpx.AsyncBaseTransport | None) -> None:
        self.slots = asyncio.Semaphore(max_connections)
        self.inner = inner or httpx.AsyncHTTPTransport(limits=_limits(max_connections))
        self._owned = inner is None
        self._until_shutdown = self._close_with_loop()

    async def start(self) -> None:
        if self._owned:
            await anext(self._until_shutdown)

    async def _close_with_loop(self) -> AsyncGenerator[None]:
        # `asyncio.run` closes generators that are still open before it closes the loop.
        try:
            yield
        finally:
            await self.inner.aclose()


class AsyncKeepingTransport(httpx.AsyncBaseTransport):
    """The same for async clients, in any number of event loops, one after the other or at once.

    Args:
        max_connections: the most that are open at once in one event loop.
        inner: what sends; None: a connection pool of its own for each event loop.
    """

    def __init__(self, max_connections: int, inner: httpx.AsyncBaseTransport | None = None) -> None:
        self._max_connections = max_connections
        self._inner = inner
        self._pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopPool] = (
            weakref.WeakKeyDictionary()
        )

    async def _pool(self) -> _LoopPool:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            pool = self._pools[loop] = _LoopPool(self._max_connections, self._inner)
            await pool.start()
        return pool

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; waits while no connection is free."""
        pool = await self._pool()
        exchange = _exchange_of(request)
        if exchange is None:
            return await pool.inner.handle_async_request(request)
        exchange.prepare(request, await request.aread())
        held = False
        try:
            await pool.slots.acquire()
            held = True
            response = await pool.inner.handle_async_request(request)
            if _is_stream(response):
                held = False  # the stream gives it back when it is closed
                return _rewritten(response, stream=_AsyncKept(response, exchange, pool.slots))
            try:
                content = exchange.keep(response.status_code, await response.aread())
            finally:
                await response.aclose()
            return _rewritten(response, content=content)
        except BaseException as broken:
            exchange.fail(broken)
            raise
        finally:
            if held:
                pool.slots.release()

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.inner.aclose()


class Through(httpx.BaseTransport):
    """Sends through a client of the user's, with its proxies, hooks and certificates."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request."""
        return self._client.send(_rebuilt(self._client, request), stream=True)


class AsyncThrough(httpx.AsyncBaseTransport):
    """The same for async clients."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request."""
        return await self._client.send(_rebuilt(self._client, request), stream=True)


def _rebuilt(client: Any, request: httpx.Request) -> Any:
    # Built by the client itself: it may be of httpx or of httpx2, which OpenAI's SDK accepts alike.
    return client.build_request(
        request.method,
        str(request.url),
        headers=request.headers.multi_items(),
        content=b"".join(cast(httpx.ByteStream, request.stream)),
        extensions=request.extensions,
    )


def _limits(max_connections: int) -> httpx.Limits:
    return httpx.Limits(
        max_connections=max_connections, max_keepalive_connections=max_connections, keepalive_expiry=5.0
    )


# -- clients -----------------------------------------------------------------------------------------


class KeepingClient(httpx.Client):
    """What to give to ``openai.OpenAI(http_client=...)``."""


class AsyncKeepingClient(httpx.AsyncClient):
    """What to give to ``openai.AsyncOpenAI(http_client=...)``; good in every event loop."""


@lru_cache(maxsize=16)
def keeping_client(max_connections: int) -> KeepingClient:
    """The process's client with so many connections: models made anew for each call share their pool."""
    return KeepingClient(transport=KeepingTransport(max_connections), timeout=None, follow_redirects=True)


@lru_cache(maxsize=16)
def async_keeping_client(max_connections: int) -> AsyncKeepingClient:
    """The same for async clients."""
    transport = AsyncKeepingTransport(max_connections)
    return AsyncKeepingClient(transport=transport, timeout=None, follow_redirects=True)
