"""A vLLM that dies is restarted; those who talk to it wait. A fake server, real processes, real HTTP."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from fakes.vllm_interpreter import fake_interpreter

from art_core.config import EngineConfig, LoRAConfig
from art_core.errors import EngineError
from art_core.inference.engine import EngineEvent
from art_core.inference.vllm import VLLMEngine
from art_core.types import PolicyVersion

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX")

V0, V1, V2 = (PolicyVersion("agent", n) for n in range(3))


def adapter(directory: Path) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"r": 8}))
    return directory


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


class Watched:
    """An engine, and what it told of itself."""

    def __init__(self, tmp_path: Path, mode: str = "answers", **settings) -> None:
        self.events: list[EngineEvent] = []
        config = EngineConfig(python=fake_interpreter(tmp_path / "fake", mode), **settings)
        self.engine = VLLMEngine(
            "org/model", config, LoRAConfig(rank=8), "agent", tmp_path / "logs", on_event=self.events.append
        )

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    @property
    def pid(self) -> int:
        process = self.engine._keeper.process
        assert process is not None
        return process.pid

    def names(self) -> list[str]:
        return [card["id"] for card in httpx.get(f"{self.engine.base_url}/models").json()["data"]]

    def serves(self, name: str) -> bool:
        """Whether it does now; a server that is on its way back serves nothing."""
        try:
            return name in self.names()
        except httpx.TransportError:
            return False

    async def kill(self) -> None:
        """SIGKILL, and wait for the restart."""
        restarts = self.kinds.count("engine_restarted")
        os.kill(self.pid, signal.SIGKILL)
        await until(lambda: self.kinds.count("engine_restarted") > restarts)


@contextlib.asynccontextmanager
async def started(watched: Watched) -> AsyncIterator[Watched]:
    await watched.engine.start()
    try:
        await watched.engine.publish(V0, None)
        yield watched
    finally:
        await watched.engine.close()


async def test_a_killed_server_comes_back_at_its_address_with_every_version(tmp_path: Path):
    """C43."""
    async with started(Watched(tmp_path)) as vllm:
        engine, address, log = vllm.engine, vllm.engine.base_url, vllm.engine.log_path
        await engine.publish(V1, adapter(tmp_path / "a1"))
        await engine.publish(V2, adapter(tmp_path / "a2"))
        await engine.retire(V1)
        await vllm.kill()
        assert engine.base_url == address
        assert vllm.names() == ["agent@0", "agent", "agent@2"]
        assert engine.versions() == (V0, V2)
        assert (await engine.health()).ok
        event = vllm.events[-1]
        assert event.data["cause"] == "vLLM was ended by SIGKILL: killed from outside"
        assert event.data["log"] == str(log)
        assert event.data["new_log"] == str(engine.log_path) != str(log)
        assert event.data["versions"] == ["agent@0", "agent@2"]
        await engine.publish(V1, tmp_path / "a1")
        assert "agent@1" in vllm.names()


async def test_what_is_published_while_the_server_is_down_is_served_when_it_is_back(tmp_path: Path):
    async with started(Watched(tmp_path)) as vllm:
        os.kill(vllm.pid, signal.SIGKILL)
        await vllm.engine.publish(V1, adapter(tmp_path / "a1"))
        assert "agent@1" in vllm.names()
        assert vllm.engine.versions() == (V0, V1)
        assert vllm.kinds == ["engine_restarted"]


async def test_a_server_that_hangs_is_killed_and_restarted(tmp_path: Path):
    """C43."""
    async with started(Watched(tmp_path, hang_timeout=1.0)) as vllm:
        await vllm.engine.publish(V1, adapter(tmp_path / "a1"))
        hung = vllm.pid
        life = await vllm.engine.availability.aready()  # asked later, it may be the next one already
        os.kill(hung, signal.SIGSTOP)
        assert await vllm.engine.availability.alost(life)
        assert vllm.pid != hung
        assert "does not answer" in vllm.events[0].data["cause"]
        await until(lambda: vllm.serves("agent@1"))


async def test_a_pause_outlives_a_restart(tmp_path: Path):
    async with started(Watched(tmp_path, "serve")) as vllm:
        root = vllm.engine.base_url.removesuffix("/v1")
        await vllm.engine.pause()
        await vllm.kill()
        assert httpx.get(f"{root}/paused").json() is True
        await vllm.engine.resume()
        await vllm.kill()
        assert httpx.get(f"{root}/paused").json() is False


async def test_a_version_that_a_living_server_lost_is_published_again(tmp_path: Path):
    async with started(Watched(tmp_path)) as vllm:
        await vllm.engine.publish(V1, adapter(tmp_path / "a1"))
        async with httpx.AsyncClient() as client:
            gone = await client.post(
                f"{vllm.engine.base_url}/unload_lora_adapter", json={"lora_name": "agent@1"}
            )
            assert gone.status_code == 200
            life = await vllm.engine.availability.aready()
            answer = await client.post(
                f"{vllm.engine.base_url}/chat/completions", json={"model": "agent@1", "messages": []}
            )
            assert answer.status_code == 404
            assert await vllm.engine.availability.alost(life), "the request can be sent again"
        assert "agent@1" in vllm.names()
        assert vllm.kinds == ["version_republished"]


async def test_an_adapter_that_is_gone_does_not_keep_the_others_from_being_served(tmp_path: Path):
    async with started(Watched(tmp_path, "serve")) as vllm:
        await vllm.engine.publish(V1, adapter(tmp_path / "a1"))
        await vllm.engine.publish(V2, adapter(tmp_path / "a2"))
        (tmp_path / "a1" / "broken").touch()
        await vllm.kill()
        assert vllm.kinds == ["version_lost", "engine_restarted"]
        assert "agent@1 could not be published again" in vllm.events[0].message
        assert vllm.engine.versions() == (V0, V2)


async def test_restarts_end_when_the_budget_is_spent_and_waiting_requests_are_told_why(tmp_path: Path):
    """C43."""
    async with started(Watched(tmp_path, max_restarts=1)) as vllm:
        await vllm.kill()
        life = await vllm.engine.availability.aready()
        waiting = [asyncio.create_task(vllm.engine.availability.alost(life)) for _ in range(3)]
        os.kill(vllm.pid, signal.SIGKILL)
        for task in waiting:
            with pytest.raises(EngineError, match=r"SIGKILL(.*\n)+.*restarted 1 times within 3600 s"):
                await task
        assert vllm.kinds == ["engine_restarted", "engine_failed"]
        health = await vllm.engine.health()
        assert not health.ok
        assert "not restarted" in health.detail
        with pytest.raises(EngineError, match="not restarted"):
            await vllm.engine.publish(V1, adapter(tmp_path / "a1"))


async def test_a_connection_that_merely_broke_is_the_clients_own_affair(tmp_path: Path):
    async with started(Watched(tmp_path)) as vllm:
        life = await vllm.engine.availability.aready()
        assert not await vllm.engine.availability.alost(life)
        assert not await asyncio.to_thread(vllm.engine.availability.lost, life)
        assert vllm.kinds == []


async def test_closing_during_a_restart_leaves_nothing_running(tmp_path: Path):
    others = set(threading.enumerate())  # of servers that other tests keep
    vllm = Watched(tmp_path)
    await vllm.engine.start()
    first = vllm.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: vllm.pid != first)
    second = vllm.pid
    await vllm.engine.close()
    assert not Path(f"/proc/{second}").exists()
    assert vllm.kinds == []
    assert not [t for t in threading.enumerate() if t.name == "vllm-agent" and t not in others]


def test_an_engine_that_is_dropped_takes_its_watchdog_and_its_server_along(tmp_path: Path):
    vllm = Watched(tmp_path)
    asyncio.run(vllm.engine.start())
    pid = vllm.pid
    watchdog = vllm.engine._keeper.watchdog
    thread = watchdog._thread
    assert thread is not None
    del vllm
    watchdog.wake()
    asyncio.run(until(lambda: not thread.is_alive()))
    asyncio.run(until(lambda: not Path(f"/proc/{pid}").exists()))
