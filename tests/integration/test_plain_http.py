"""The HTTP client of capture and gateway, against a server that says exactly these bytes."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest

from art_core.plain_http import HttpError, HttpPool, request_bytes

REQUEST = request_bytes("POST", b"/v1/x?y=1", [(b"host", b"h"), (b"content-length", b"2")], b"{}")
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"

Place = tuple[str, int]


@asynccontextmanager
async def server(*turns: bytes | None, close: bool = False) -> AsyncGenerator[tuple[Place, list[int]]]:
    """Answers the requests of each connection with these bytes, in turn; None is no answer at all.

    Yields its address, and the number of requests of each connection.
    """
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        mine = len(connections) - 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while connections[mine] < len(turns):
                await reader.readexactly(len(REQUEST))
                connections[mine] += 1
                turn = turns[connections[mine] - 1]
                if turn is not None:
                    writer.write(turn)
                    await writer.drain()
            if not close:
                await reader.read()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[:2], connections
    finally:
        listening.close()


async def ask(pool: HttpPool, place: Place) -> bytes:
    return await (await pool.send(place, REQUEST, read_timeout=60)).read()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    "answer",
    [
        WHOLE,
        b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n" + WHOLE,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n1\r\ni\r\n0\r\nTrailer: t\r\n\r\n",
    ],
    ids=["length", "after an interim answer", "chunked"],
)
async def test_connection_is_used_again_once_its_answer_came_to_its_end(answer: bytes) -> None:
    pool = HttpPool()
    async with server(answer, answer) as (place, connections):
        assert await ask(pool, place) == b"hi"
        assert await ask(pool, place) == b"hi"
        assert connections == [2]
        pool.close()


async def test_answer_without_a_length_ends_with_its_connection() -> None:
    pool = HttpPool()
    async with server(b"HTTP/1.1 200 OK\r\n\r\nhi", close=True) as (place, connections):
        assert await ask(pool, place) == b"hi"
        assert await ask(pool, place) == b"hi"
        assert connections == [1, 1]
        pool.close()


async def test_connection_that_the_server_closed_is_not_used_again() -> None:
    pool = HttpPool()
    async with server(WHOLE, close=True) as (place, connections):
        for _ in range(20):
            assert await ask(pool, place) == b"hi"
        assert connections == [1] * 20
        pool.close()


async def test_request_that_met_a_connection_being_closed_is_sent_over_a_new_one() -> None:
    pool = HttpPool(resends=True)
    async with server(WHOLE, None, close=True) as (place, connections):
        assert await ask(pool, place) == b"hi"
        assert await ask(pool, place) == b"hi"
        assert connections == [2, 1]
        pool.close()


async def test_request_that_may_not_be_sent_twice_ends_with_the_connection_it_met() -> None:
    pool = HttpPool()
    async with server(WHOLE, None, close=True) as (place, connections):
        assert await ask(pool, place) == b"hi"
        with pytest.raises(HttpError, match="without an answer"):
            await ask(pool, place)
        assert connections == [2]
        pool.close()


async def test_request_that_a_new_connection_refuses_too_is_an_error() -> None:
    answered = asyncio.Event()

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(REQUEST))
        if not answered.is_set():
            answered.set()
            writer.write(WHOLE)
            await reader.readexactly(len(REQUEST))
        writer.close()

    pool = HttpPool(resends=True)
    async with await asyncio.start_server(once, "127.0.0.1", 0) as listening:
        place: Place = listening.sockets[0].getsockname()[:2]
        assert await ask(pool, place) == b"hi"
        with pytest.raises(HttpError, match="without an answer") as raised:
            await ask(pool, place)
        assert raised.value.kind == "read"
        pool.close()


async def test_request_that_was_sent_to_a_server_which_then_is_gone_does_not_count_as_unsent() -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(REQUEST))
        writer.write(WHOLE)
        await reader.readexactly(len(REQUEST))
        listening.close()
        writer.close()

    pool = HttpPool(resends=True)
    listening = await asyncio.start_server(once, "127.0.0.1", 0)
    place: Place = listening.sockets[0].getsockname()[:2]
    assert await ask(pool, place) == b"hi"
    with pytest.raises(HttpError) as raised:
        await ask(pool, place)
    assert raised.value.kind == "read"
    pool.close()


async def test_answer_that_broke_off_on_a_kept_connection_is_not_asked_for_again() -> None:
    pool = HttpPool(resends=True)
    async with server(WHOLE, WHOLE[:9], close=True) as (place, connections):
        assert await ask(pool, place) == b"hi"
        with pytest.raises(HttpError):
            await ask(pool, place)
        assert connections == [2]
        pool.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        WHOLE[:-1],
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhi",
        b"this is no HTTP\r\n\r\n",
    ],
    ids=["nothing", "cut", "cut chunk", "garbage"],
)
async def test_answer_that_is_not_whole_is_an_error(answer: bytes) -> None:
    pool = HttpPool()
    async with server(answer, close=True) as (place, _):
        with pytest.raises(HttpError) as raised:
            await ask(pool, place)
        assert raised.value.kind == "read"
        pool.close()


async def test_silence_is_an_error_after_the_time_limit() -> None:
    pool = HttpPool()
    async with server(None) as (place, _):
        with pytest.raises(HttpError) as raised:
            await pool.send(place, REQUEST, read_timeout=0.05)
        assert raised.value.kind == "read_timeout"
        pool.close()


async def test_nobody_listening_is_an_error() -> None:
    async with server(WHOLE) as (place, _):
        pass
    with pytest.raises(HttpError) as raised:
        await HttpPool().send(place, REQUEST)
    assert raised.value.kind == "connect"


async def test_answer_that_its_reader_leaves_takes_its_connection_down() -> None:
    pool = HttpPool()
    async with server(WHOLE[:-1], WHOLE) as (place, connections):
        (await pool.send(place, REQUEST)).close()
        with pytest.raises(HttpError):
            await (await pool.send(place, REQUEST, read_timeout=0.05)).read()
        await until(lambda: connections == [1, 1])
        pool.close()


async def test_cancelled_call_takes_its_connection_down() -> None:
    pool = HttpPool()
    async with server(None, WHOLE) as (place, connections):
        call = asyncio.create_task(pool.send(place, REQUEST))
        await until(lambda: connections == [1])
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(HttpError):
            await pool.send(place, REQUEST, read_timeout=0.05)
        await until(lambda: connections == [1, 1])
        pool.close()


async def test_long_answer_waits_for_its_reader_and_comes_whole() -> None:
    body = bytes(range(256)) * (1 << 16)
    pool = HttpPool()
    async with server(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body) as (place, _):
        answer = await pool.send(place, REQUEST, read_timeout=60)
        await asyncio.sleep(0.05)  # more than is let in has come
        assert b"".join([piece async for piece in answer.pieces()]) == body
        pool.close()


@pytest.mark.parametrize("value", [b"a\r\nx-more: b", b"a\nb", b"a\rb"])
def test_line_breaks_in_headers_are_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="line break"):
        request_bytes("POST", b"/", [(b"x", value)], b"")
