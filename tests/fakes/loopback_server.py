"""A server on loopback, on its own thread and event loop.

HTTP/1.1 is spoken by hand: that keeps it quick enough for benchmarks, and lets a fault cut a connection at
any byte. What is answered, `LoopbackServer._respond` of a subclass says.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self


class Cut(Exception):
    """The connection is to be closed at once."""


class LoopbackServer:
    """The server; a context manager.

    Args:
        port: to listen on, shared with others that allow it, as vLLM does; 0 for any free one.
    """

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self.open_connections = 0
        self.max_connections = 0
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._started = threading.Event()

    async def _respond(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        raw: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Answer one request, or raise `Cut`; the reader is for who waits until the client gives up."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="loopback-server", daemon=True
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

        shared: dict[str, Any] = {"reuse_port": True} if self.port else {}
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
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError, Cut):
            pass
        finally:
            self.open_connections -= 1
            writer.transport.abort()


def send(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    """Answer with JSON."""
    writer.write(
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (status, HTTPStatus(status).phrase.encode(), len(body), body)
    )


async def send_stream(writer: asyncio.StreamWriter, chunks: AsyncIterator[bytes], *, cut: bool) -> None:
    """Answer with server-sent events; ``cut``: the connection breaks after two of them."""
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    sent = 0
    async for chunk in chunks:
        if cut and sent == 2:
            await writer.drain()
            raise Cut
        writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        sent += 1
        await writer.drain()
    writer.write(b"0\r\n\r\n")
