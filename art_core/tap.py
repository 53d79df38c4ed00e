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
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from functools import lru_cache
from typing import Any, cast

from art_core.exchange import UNFINISHED as UNFINISHED
from art_core.exchange import Exchange as Exchange
from art_core.exchange import exchange_of
from art_core.plain_transport import PlainTransport
from art_core.sdk_http import httpx

# -- transports --------------------------------------------------------------------------------------


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
        exchange = exchange_of(request)
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
        self.inner = inner or PlainTransport(httpx.AsyncHTTPTransport(limits=_limits(max_connections)))
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
        exchange = exchange_of(request)
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
