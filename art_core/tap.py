"""An HTTP client for completions that keeps what passes through it: OpenAI's SDK on top, any engine below.

Invariant: the SDK sends and gets what it would without capture, and an `Exchange` holds what the server
really said, also where the SDK then raises (an answer that does not parse was still sampled).

A request is bound to its exchange by a header, which never leaves this process: the SDK passes headers on
unchanged on every path (create, parse, stream, retries), where context variables would depend on who
iterates a stream, and in which task. In the transport the request gets its address, its policy version
and capture's extras; the answer is read once, kept, and handed on without what was not asked for.

Where the exchange's server is one that is restarted when it dies, a request waits for it, and is sent again
when its answer did not begin to come: it was not accepted, or what was sampled is lost with the server.

Connections are bounded for each event loop, and for all threads together. A call that finds none free
waits for as long as its caller lets it: there is no timeout of its own.
"""

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from functools import lru_cache
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar, cast

from art_core.exchange import UNFINISHED as UNFINISHED
from art_core.exchange import Exchange as Exchange
from art_core.exchange import exchange_of
from art_core.inference.availability import MAX_LIVES, Availability, HeldTooLongError
from art_core.plain_http import KEPT_SECONDS
from art_core.plain_transport import PlainTransport
from art_core.sdk_http import httpx

Rest = TypeVar("Rest")

# -- transports --------------------------------------------------------------------------------------


def _held(server: Availability) -> int | HeldTooLongError:
    """The life of a server that a request goes to, or why it is not sent."""
    try:
        return server.ready()
    except HeldTooLongError as held:
        return held


async def _aheld(server: Availability) -> int | HeldTooLongError:
    try:
        return await server.aready()
    except HeldTooLongError as held:
        return held


def _refusal(held: HeldTooLongError) -> httpx.Response:
    """What the server's own door answers: SDKs hide what a transport raises, and would wait as long again."""
    error = {"message": str(held), "type": "server_error", "param": None, "code": 503}
    return httpx.Response(503, json={"error": error}, headers={"x-should-retry": "false"})


def _is_stream(response: httpx.Response) -> bool:
    return response.status_code == 200 and "event-stream" in response.headers.get("content-type", "")


_OUTDATED = frozenset({b"content-length", b"content-encoding", b"transfer-encoding"})


def _rewritten(response: httpx.Response, **content: Any) -> httpx.Response:
    headers = [(k, v) for k, v in response.headers.raw if k.lower() not in _OUTDATED]
    return httpx.Response(response.status_code, headers=headers, extensions=response.extensions, **content)


class _Kept(httpx.SyncByteStream):
    def __init__(
        self, begun: "_Begun[Iterator[bytes]]", exchange: Exchange, slot: threading.Semaphore
    ) -> None:
        self._response, self._exchange, self._slot = begun.response, exchange, slot
        self._pieces = chain((begun.content,), begun.rest or ())
        self._keeper = exchange.streaming()
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        try:
            for piece in self._pieces:
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
    def __init__(
        self, begun: "_Begun[AsyncIterator[bytes]]", exchange: Exchange, slot: asyncio.Semaphore
    ) -> None:
        self._response, self._exchange, self._slot = begun.response, exchange, slot
        self._pieces = _pieces(begun)  # once: the SDK drains a stream after it has read it
        self._keeper = exchange.streaming()
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._pieces:
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


class _Begun(NamedTuple, Generic[Rest]):
    """An answer of which something has come: all of it, or the first piece of a stream."""

    response: httpx.Response
    content: bytes
    rest: Rest | None = None


def _begin(inner: httpx.BaseTransport, request: httpx.Request) -> _Begun[Iterator[bytes]]:
    response = inner.handle_request(request)
    try:
        if not _is_stream(response):
            return _Begun(response, response.read())
        pieces = response.iter_bytes()
        return _Begun(response, next(pieces, b""), pieces)
    except BaseException:
        response.close()
        raise


async def _pieces(begun: _Begun[AsyncIterator[bytes]]) -> AsyncGenerator[bytes]:
    yield begun.content
    if begun.rest is not None:
        async for piece in begun.rest:
            yield piece


async def _abegin(inner: httpx.AsyncBaseTransport, request: httpx.Request) -> _Begun[AsyncIterator[bytes]]:
    response = await inner.handle_async_request(request)
    try:
        if not _is_stream(response):
            return _Begun(response, await response.aread())
        pieces = response.aiter_bytes()
        return _Begun(response, await anext(pieces, b""), pieces)
    except BaseException:
        await response.aclose()
        raise


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
            begun = self._send(request, exchange)
            if begun.rest is not None:
                held = False  # the stream gives it back when it is closed
                return _rewritten(begun.response, stream=_Kept(begun, exchange, self._slots))
            begun.response.close()
            return _rewritten(
                begun.response, content=exchange.keep(begun.response.status_code, begun.content)
            )
        except BaseException as broken:
            exchange.fail(broken)
            raise
        finally:
            if held:
                self._slots.release()

    def _send(self, request: httpx.Request, exchange: Exchange) -> _Begun[Iterator[bytes]]:
        """Send it until an answer begins, which takes more than once if the server dies over it."""
        server = exchange.server
        for last in (*[False] * (MAX_LIVES - 1), True):
            life = _held(server)
            if isinstance(life, HeldTooLongError):
                return _Begun(refused := _refusal(life), refused.content)
            try:
                begun = _begin(self._inner, request)
            except Exception as failed:
                if last or not server.lost(life, looks_restarted=exchange.dropped(failed)):
                    raise
            else:
                status = begun.response.status_code
                suspicious = not last and exchange.suspicious(status)
                if not (suspicious and server.lost(life, looks_restarted=status == 404)):
                    return begun
                begun.response.close()
            exchange.attempts += 1
        raise AssertionError("unreachable: the last try returns or raises")

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
            begun = await self._send(pool.inner, request, exchange)
            if begun.rest is not None:
                held = False  # the stream gives it back when it is closed
                return _rewritten(begun.response, stream=_AsyncKept(begun, exchange, pool.slots))
            await begun.response.aclose()
            return _rewritten(
                begun.response, content=exchange.keep(begun.response.status_code, begun.content)
            )
        except BaseException as broken:
            exchange.fail(broken)
            raise
        finally:
            if held:
                pool.slots.release()

    async def _send(
        self, inner: httpx.AsyncBaseTransport, request: httpx.Request, exchange: Exchange
    ) -> _Begun[AsyncIterator[bytes]]:
        """Send it until an answer begins, which takes more than once if the server dies over it."""
        server = exchange.server
        for last in (*[False] * (MAX_LIVES - 1), True):
            life = await _aheld(server)
            if isinstance(life, HeldTooLongError):
                return _Begun(refused := _refusal(life), refused.content)
            try:
                begun = await _abegin(inner, request)
            except Exception as failed:
                if last or not await server.alost(life, looks_restarted=exchange.dropped(failed)):
                    raise
            else:
                status = begun.response.status_code
                suspicious = not last and exchange.suspicious(status)
                if not (suspicious and await server.alost(life, looks_restarted=status == 404)):
                    return begun
                await begun.response.aclose()
            exchange.attempts += 1
        raise AssertionError("unreachable: the last try returns or raises")

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
        max_connections=max_connections,
        max_keepalive_connections=max_connections,
        keepalive_expiry=KEPT_SECONDS,
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
