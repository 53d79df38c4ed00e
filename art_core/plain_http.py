"""HTTP/1.1 over plain TCP for asyncio: what stands between us and a server that runs next to us.

Invariant: a connection carries one request at a time, and is used again only after its answer came to its
end; whoever is cancelled, times out or leaves an answer early takes the connection down with it.

It does for ``http://`` addresses what httpx does, at about a third of the time: capture is to cost next to
nothing. No TLS, proxies or redirects: who needs those takes httpx. How many requests are under way is the
caller's to bound.
"""

import asyncio
import select
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from typing import Literal, cast

from httptools import HttpParserError, HttpResponseParser

from art_core.errors import ArtError

KEPT_SECONDS = 4.0
"""How long a connection may be idle and be used again; servers commonly close theirs after 5."""

SERVER_KEPT_SECONDS = 600
"""How long servers of ours leave an idle connection open.

Whoever closes first breaks what the other is just sending: that must be the client, who knows what it is
about to send. So this is longer than clients and load balancers commonly keep theirs (OpenAI's SDK 5 s,
aiohttp 15, AWS 60, Go 90), by more than a busy client's event loop may lag behind.
"""

_HIGH_WATER = 1 << 20
"""Bytes of an answer that may wait for their reader before the server is held back."""

Headers = list[tuple[bytes, bytes]]


class HttpError(ArtError):
    """No whole answer came.

    Attributes:
        kind: whether connecting or reading failed, by itself or by its time limit.
    """

    def __init__(
        self, kind: Literal["connect", "connect_timeout", "read", "read_timeout"], message: str
    ) -> None:
        super().__init__(message)
        self.kind = kind


class _Connection(asyncio.Protocol):
    """One connection; the methods without underscore that nobody calls are asyncio's and the parser's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parser = HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._problem: HttpError | None = None
        self._paused = False
        self.idle_since = 0.0
        self.closed = False
        self._dropped = False
        self._reset()
        self.complete = True  # nothing is asked yet

    def _reset(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.complete = False
        self._head = self._lasts = self._heard = False
        self._pieces: deque[bytes] = deque()
        self._waiting_bytes = 0

    # -- the caller's side -------------------------------------------------------------------------

    def send(self, request: bytes) -> None:
        """Send a request; its answer is the next one."""
        if self.closed:
            raise HttpError("connect", "the server closed the connection before the request was sent")
        self._reset()
        self._transport.write(request)

    async def head(self, timeout: float | None) -> None:
        """Wait for status and headers."""
        while not self._head:
            await self._wait(timeout)

    async def piece(self, timeout: float | None) -> bytes:
        """The next bytes of the body, all that have come; empty at its end."""
        while not self._pieces:
            if self.complete:
                return b""
            await self._wait(timeout)
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._waiting_bytes = 0
        if self._paused and not self.closed:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def rest(self, timeout: float | None) -> bytes:
        """All of the body that was not read yet."""
        while not self.complete:
            await self._wait(timeout)
            if self._paused:
                self._paused = False
                self._transport.resume_reading()
        return await self.piece(timeout)

    async def _wait(self, timeout: float | None) -> None:
        if self._problem is not None:
            raise self._problem
        waiter = self._waiter = self._loop.create_future()
        # Not asyncio.timeout: this is done for every piece, and costs a fifth.
        timer = None if timeout is None else self._loop.call_later(timeout, self._late, waiter, timeout)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _late(self, waiter: "asyncio.Future[None]", timeout: float) -> None:
        if not waiter.done():
            waiter.set_exception(HttpError("read_timeout", f"nothing came for {timeout:g} s"))

    def usable(self, now: float) -> bool:
        """Whether another request can be sent: it is open, and has not been idle for long."""
        if self.closed or now - self.idle_since > KEPT_SECONDS:
            return False
        # The server may have closed it, and the loop not have seen that yet.
        readable = select.poll()
        readable.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not readable.poll(0)

    @property
    def keeps_alive(self) -> bool:
        """Whether it may be used again, now that an answer is complete."""
        return self.complete and self._lasts and not self.closed

    @property
    def refused(self) -> bool:
        """Whether the server closed it without a byte of the answer."""
        return self._dropped and not self._heard

    def abort(self) -> None:
        """Close it at once."""
        self.closed = True
        self._transport.abort()

    # -- asyncio's side ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.complete:  # nobody has asked for this
            self.abort()
            return
        self._heard = True
        try:
            self._parser.feed_data(data)
        except HttpParserError as broken:
            self._problem = HttpError("read", f"the server's answer is no HTTP: {broken}")
            self.abort()
        if self._waiting_bytes > _HIGH_WATER and not (self._paused or self.closed):
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._dropped = not self.closed
        self.closed = True
        if not self.complete and self._problem is None:
            if self._head and exc is None and self._ends_with_connection():
                self.complete = True
            else:
                came = "in the middle of its answer" if self._head else "without an answer"
                self._problem = HttpError("read", f"the server closed the connection {came}")
        self._wake()

    def _ends_with_connection(self) -> bool:
        return not any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            if self._problem is not None and not self._pieces:
                self._waiter.set_exception(self._problem)
            else:
                self._waiter.set_result(None)

    # -- the parser's side -------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head:  # else it is a trailer
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._head = self.status >= 200
        self._lasts = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._waiting_bytes += len(body)

    def on_message_complete(self) -> None:
        if self._head:
            self.complete = True
        else:  # "103 Early Hints" and the like: the answer is still to come
            self.headers = []


class Answer:
    """An answer whose head has come; its body is read once, by `read` or by iterating `pieces`.

    Attributes:
        status: HTTP status.
        headers: names in lower case.
    """

    def __init__(self, pool: "HttpPool", place: tuple[str, int], connection: _Connection) -> None:
        self._pool, self._place, self._connection = pool, place, connection
        self._done = False
        self.timeout: float | None = None
        self.status = connection.status
        self.headers = connection.headers

    def header(self, name: bytes) -> str:
        """The first header of this name (in lower case); empty if there is none."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), "")

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            HttpError: it did not come to its end.
        """
        try:
            return await self._connection.rest(self.timeout)
        finally:
            self.close()

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The body, in the pieces in which it comes; raises what `read` raises."""
        while piece := await self._connection.piece(self.timeout):
            yield piece
        self.close()

    def close(self) -> None:
        """Give the connection back, or close it if the body has not come to its end."""
        if not self._done:
            self._done = True
            self._pool.give_back(self._place, self._connection)


class HttpPool:
    """The connections of one event loop.

    Args:
        resends: whether a request is sent once more, over a new connection, when the server closes one that
            was kept without a byte of an answer: most likely it closed it while the request was on its way
            (RFC 9112, 9.3.1 and 9.6). For requests of which a second one does no harm.
    """

    def __init__(self, *, resends: bool = False) -> None:
        self._resends = resends
        self._idle: dict[tuple[str, int], list[_Connection]] = {}
        self._open: set[_Connection] = set()

    async def send(
        self,
        place: tuple[str, int],
        request: bytes,
        *,
        connect_timeout: float | None = None,
        read_timeout: float | None = None,
    ) -> Answer:
        """Send a request (see `request_bytes`) and wait for the head of its answer.

        Raises:
            HttpError: there is none.
        """
        kept = self._idle_one(place)
        if kept is None:
            return await self._ask(place, await self._connect(place, connect_timeout), request, read_timeout)
        try:
            return await self._ask(place, kept, request, read_timeout)
        except HttpError as closed:
            if not (self._resends and kept.refused):
                raise
            try:
                fresh = await self._connect(place, connect_timeout)
            except HttpError:
                raise closed from None  # the server took the request, and is gone
        return await self._ask(place, fresh, request, read_timeout)

    async def _ask(
        self, place: tuple[str, int], connection: _Connection, request: bytes, read_timeout: float | None
    ) -> Answer:
        try:
            connection.send(request)
            await connection.head(read_timeout)
        except BaseException:
            self._close(connection)
            raise
        answer = Answer(self, place, connection)
        answer.timeout = read_timeout
        return answer

    def give_back(self, place: tuple[str, int], connection: _Connection) -> None:
        """Keep a connection for the next request, if it can be used again."""
        if not connection.keeps_alive:
            self._close(connection)
            return
        now = connection.idle_since = asyncio.get_running_loop().time()
        idle = self._idle.setdefault(place, [])
        idle.append(connection)
        while now - idle[0].idle_since > KEPT_SECONDS:  # the first has been idle for longest
            self._close(idle.pop(0))

    def close(self) -> None:
        """Close all connections, also those in use."""
        for connection in tuple(self._open):
            self._close(connection)
        self._idle.clear()

    def _idle_one(self, place: tuple[str, int]) -> _Connection | None:
        idle = self._idle.get(place)
        while idle:
            connection = idle.pop()
            if connection.usable(asyncio.get_running_loop().time()):
                return connection
            self._close(connection)
        return None

    async def _connect(self, place: tuple[str, int], timeout: float | None) -> _Connection:
        loop = asyncio.get_running_loop()
        where = f"{place[0]}:{place[1]}"
        try:
            async with asyncio.timeout(timeout):
                _, connection = await loop.create_connection(lambda: _Connection(loop), *place)
        except TimeoutError as late:
            raise HttpError("connect_timeout", f"{where} took no connection in {timeout:g} s") from late
        except OSError as refused:
            raise HttpError("connect", f"{where} cannot be connected to: {refused}") from refused
        self._open.add(connection)
        return connection

    def _close(self, connection: _Connection) -> None:
        self._open.discard(connection)
        connection.abort()


def request_bytes(method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    """A request as it goes over the wire.

    Args:
        method: in capitals.
        target: path and query.
        headers: all of them, ``host`` and ``content-length`` too.
        body: the whole of it.

    Raises:
        ValueError: a header or the target has a line break in it.
    """
    lines = [b"%b %b HTTP/1.1" % (method.encode(), target), *[b"%b: %b" % header for header in headers]]
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1:
        raise ValueError("a header of the request has a line break in it")
    return head + b"\r\n\r\n" + body
