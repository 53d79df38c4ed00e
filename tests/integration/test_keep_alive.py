"""Servers of ours leave a connection open for longer than clients keep one. Clocks are put forward."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from http.client import HTTPConnection

import httpx
import pytest
import uvicorn
from fakes.vllm_server import FakeVLLM
from fastapi import FastAPI
from helpers.gateways import HI

from art_core.inference.embedded.server import ServerThread
from art_core.inference.gateway import Gateway
from art_core.plain_http import SERVER_KEPT_SECONDS


class ForwardLoop(asyncio.SelectorEventLoop):
    """A loop whose clock can be put forward."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead

    def put_forward(self, seconds: float) -> None:
        """From another thread; returns once what was due in these seconds has happened."""

        async def forward() -> None:
            self.ahead += seconds
            for _ in range(3):  # timers are looked at once in each turn
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(forward(), self).result(60)


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[ForwardLoop]:
    """The loops of the servers that the test starts."""
    made: list[ForwardLoop] = []

    def make() -> ForwardLoop:
        made.append(ForwardLoop())
        return made[-1]

    def factory(config: uvicorn.Config) -> Callable[[], ForwardLoop]:
        return make

    monkeypatch.setattr(uvicorn.Config, "get_loop_factory", factory)
    return made


@contextmanager
def a_gateway() -> Generator[int]:
    with FakeVLLM() as server, Gateway(server.base_url) as gateway:
        yield int(gateway.url.rpartition(":")[2])


@contextmanager
def an_embedded_server() -> Generator[int]:
    app = FastAPI()
    app.add_api_route("/health", lambda: "ok")
    thread = ServerThread(app, "127.0.0.1", None)
    asyncio.run(thread.start(60))
    try:
        yield thread.port
    finally:
        thread.stop(10)


Serving = Callable[[], AbstractContextManager[int]]
servers = pytest.mark.parametrize("serving", [a_gateway, an_embedded_server])


def ask(connection: HTTPConnection) -> int:
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    return answer.status


@servers
def test_a_connection_that_was_idle_for_longer_than_clients_keep_one_is_still_answered(
    loops: list[ForwardLoop], serving: Serving
) -> None:
    with serving() as port:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.connect()
        connection.auto_open = 0  # one that was closed is not opened again
        assert ask(connection) == 200
        loops[0].put_forward(120)
        assert ask(connection) == 200
        connection.close()


@servers
def test_a_connection_that_nobody_uses_any_more_is_closed_in_the_end(
    loops: list[ForwardLoop], serving: Serving
) -> None:
    with serving() as port:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        assert ask(connection) == 200
        loops[0].put_forward(SERVER_KEPT_SECONDS + 1)
        assert connection.sock.recv(1) == b""
        connection.close()


def test_a_server_that_closes_a_connection_as_it_is_used_again_costs_its_clients_nothing() -> None:
    with FakeVLLM() as server, Gateway(server.base_url) as gateway:
        body = {"model": "m", "messages": HI}
        url = f"{gateway.base_url}/chat/completions"
        assert httpx.post(url, json=body).status_code == 200
        server.fail(1.0, ["drop"], times=1)
        assert httpx.post(url, json=body).status_code == 200
        assert server.faults["drop"] == 1
        assert httpx.get(f"{gateway.url}/health").json()["status"] == "ok"
