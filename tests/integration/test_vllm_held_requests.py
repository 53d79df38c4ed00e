"""Requests that come while a vLLM sleeps: held at its door, and answered by what was checked.

The fake vLLM keeps the rules of vLLM: what waits inside its engine is aborted by sleep, or answered as soon
as it wakes, by adapters that sleep has damaged.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fakes.vllm_interpreter import fake_interpreter
from fakes.vllm_sleeper import HALF_WOKEN, MAIN

from art_core.config import EngineConfig, LoRAConfig
from art_core.errors import EngineError
from art_core.inference.availability import HeldTooLongError
from art_core.inference.endpoint import StaticEndpoint
from art_core.inference.engine import EngineEvent
from art_core.inference.gateway import Gateway
from art_core.inference.replicas import ReplicaSet
from art_core.inference.vllm import VLLMEngine
from art_core.inference.vllm_plugin import OWNER_HEADERS
from art_core.types import PolicyVersion
from art_langgraph import ChatART, capture

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX")

V0, V1, V2 = (PolicyVersion("agent", n) for n in range(3))


class Asleep:
    """Replicas that share their GPUs with a trainer, behind a gateway."""

    def __init__(self, replicas: ReplicaSet, engines: list[VLLMEngine]) -> None:
        self.replicas = replicas
        self.engines = engines
        self.events: list[EngineEvent] = []

    async def arrived(self) -> int:
        """Completion requests that have reached a server, canaries included."""
        async with httpx.AsyncClient(timeout=60) as client:
            roots = [engine.base_url.removesuffix("/v1") for engine in self.engines]
            return sum([int((await client.get(f"{root}/arrived")).text) for root in roots])

    async def until_arrived(self, count: int) -> None:
        while await self.arrived() < count:
            await asyncio.sleep(0.01)

    @property
    def ways(self) -> dict[str, Callable[[str], Any]]:
        """Ways to ask ``agent@1``: by the gateway, by a server's own address, and by ChatART."""
        direct = self.engines[0].base_url
        return {
            "gateway": lambda text: asked(self.replicas.base_url, text),
            "stream": lambda text: streamed(self.replicas.base_url, text),
            "direct": lambda text: asked(direct, text),
            "impostor": lambda text: asked(self.replicas.base_url, text, headers=OWNER_HEADERS),
            "worker": lambda text: recorded(direct, text),
        }


class NearEndpoint(StaticEndpoint):
    """A policy on an engine of this process."""

    def __init__(self, engine: VLLMEngine) -> None:
        super().__init__(engine.base_url, V1.name)
        self.availability = engine.availability


async def asked(
    base_url: str, text: str, version: PolicyVersion = V1, headers: Mapping[str, str] | None = None
) -> tuple[str | None, str]:
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="none", max_retries=0, default_headers=headers
    ) as client:
        answer = await client.chat.completions.create(
            model=version.name, messages=[{"role": "user", "content": text}]
        )
    return answer.choices[0].finish_reason, str(answer.choices[0].message.content)


async def streamed(base_url: str, text: str) -> tuple[str | None, str]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        chunks = [
            chunk.choices[0]
            async for chunk in await client.chat.completions.create(
                model=V1.name, messages=[{"role": "user", "content": text}], stream=True
            )
            if chunk.choices
        ]
    return chunks[-1].finish_reason, "".join(chunk.delta.content or "" for chunk in chunks)


async def recorded(base_url: str, text: str) -> tuple[str | None, str]:
    with capture() as rollout:
        await ChatART(StaticEndpoint(base_url, V1.name), max_retries=0).ainvoke(text)
    (step,) = rollout.steps
    assert step.trainable
    return step.finish_reason, step.message()


@pytest.fixture
def replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    @asynccontextmanager
    async def start(count: int = 2, **settings: Any) -> AsyncIterator[Asleep]:
        python = fake_interpreter(tmp_path / "fake", "answers", "vllm")
        (tmp_path / "fake/site/vllm/entrypoints/openai/api_server.py").write_text(MAIN)
        monkeypatch.setenv("FAKE_SLEEP_FAULT", "adapters")
        monkeypatch.setenv("FAKE_EVERY_LIFE", "1")
        monkeypatch.setenv("FAKE_LIVES", str(tmp_path / "lives"))
        config = EngineConfig(python=python, start_timeout=60, colocate=True, **settings)
        engines = [
            VLLMEngine("org/model", config, LoRAConfig(rank=8), "agent", tmp_path / f"logs-{n}")
            for n in range(count)
        ]
        replicas = ReplicaSet(engines)
        it = Asleep(replicas, engines)
        replicas.on_event = it.events.append
        await replicas.start()
        try:
            await replicas.publish(V0, None)
            directory = tmp_path / "a1"
            directory.mkdir()
            (directory / "adapter_config.json").write_text(json.dumps({"r": 8}))
            await replicas.publish(V1, directory)
            yield it
        finally:
            await replicas.close()

    return start


async def test_what_comes_while_replicas_sleep_waits_and_is_answered_by_what_was_checked(
    replicas: Callable[..., Any],
) -> None:
    async with replicas() as it:
        await it.replicas.pause()
        before = await it.arrived()
        waiting = [asyncio.create_task(way(f"question {n}")) for n in range(4) for way in it.ways.values()]
        await it.until_arrived(before + len(waiting))
        assert not any(task.done() for task in waiting)
        await it.replicas.resume()
        answers = await asyncio.gather(*waiting)
        assert {finish for finish, _ in answers} == {"stop"}
        assert HALF_WOKEN not in {said for _, said in answers}
        assert it.events == []


async def test_callers_who_never_stop_lose_nothing_over_many_cycles(replicas: Callable[..., Any]) -> None:
    async with replicas() as it:
        going, answers = True, list[tuple[str | None, str]]()

        async def ask(way: Callable[[str], Any], number: int) -> None:
            while going:
                answers.append(await way(f"question {number}"))

        callers = [asyncio.create_task(ask(way, n)) for n in range(2) for way in it.ways.values()]
        for _ in range(4):
            enough = len(answers) + len(callers)
            while len(answers) < enough:
                await asyncio.sleep(0.005)
                assert not any(caller.done() for caller in callers)
            await it.replicas.pause()
            await it.replicas.resume()
        going = False
        await asyncio.gather(*callers)
        assert {finish for finish, _ in answers} == {"stop"}
        assert HALF_WOKEN not in {said for _, said in answers}
        assert it.events == []


async def test_who_waits_for_too_long_is_told_the_way_out_and_the_replicas_stay_well(
    replicas: Callable[..., Any],
) -> None:
    async with replicas(hold_timeout=0.3) as it:
        await it.replicas.pause()
        for name, way in it.ways.items():
            with pytest.raises(
                openai.APIStatusError, match=r"held for 0\.3 s: .*EngineConfig\.hold_timeout"
            ) as told:
                await way(f"by {name}")
            assert told.value.status_code == 503
        with pytest.raises(HeldTooLongError, match=r"held for 0\.3 s: .*devices="):
            await it.engines[0].availability.aready()
        with pytest.raises(EngineError, match=r"EngineConfig\.hold_timeout"):
            await asyncio.to_thread(it.engines[0].availability.ready)
        near = NearEndpoint(it.engines[0])
        for stream in (False, True):
            with capture() as rollout, pytest.raises(openai.InternalServerError, match=r"held for 0\.3 s"):
                await ChatART(near, streaming=stream).ainvoke("by ChatART in this process")
            with capture() as sync, pytest.raises(openai.InternalServerError, match=r"held for 0\.3 s"):
                await asyncio.to_thread(ChatART(near, streaming=stream).invoke, "and without a loop")
            for recording in (rollout, sync):
                assert "EngineConfig.hold_timeout" in str(recording.steps[0].error)
                assert recording.snapshot().faults == {}, "it is not sent again, to wait as long again"
        with Gateway(near) as gateway:
            async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key="none") as client:
                with pytest.raises(openai.InternalServerError, match=r"held for 0\.3 s"):
                    await client.chat.completions.create(
                        model=V1.name,
                        messages=[{"role": "user", "content": "by a gateway before one server"}],
                    )
            assert len(gateway.completions) == 1
        await it.replicas.resume()
        assert await it.engines[0].availability.aready() == 1
        for way in it.ways.values():
            assert (await way("again"))[0] == "stop"
        assert it.events == []


@pytest.mark.parametrize("count", [1, 2])
async def test_a_server_that_dies_in_its_sleep_loses_nothing_that_waits(
    replicas: Callable[..., Any], count: int
) -> None:
    async with replicas(count) as it:
        dying = it.engines[0]
        near = NearEndpoint(dying)

        async def by_chat_art(text: str) -> tuple[str | None, str]:
            with capture() as rollout:
                await ChatART(near, max_retries=0).ainvoke(text)
            (step,) = rollout.steps
            return step.finish_reason, step.message()

        await it.replicas.pause()
        before = await it.arrived()
        waiting = [
            asyncio.create_task(it.ways[way](f"question {n}"))
            for n in range(4)
            for way in ("gateway", "stream")
        ]
        await it.until_arrived(before + len(waiting))
        near_ones = [asyncio.create_task(by_chat_art(f"near {n}")) for n in range(2)]
        assert dying.pid is not None
        os.kill(dying.pid, signal.SIGKILL)
        while (await dying.health()).ok:
            await asyncio.sleep(0.01)
        assert not any(task.done() for task in (*waiting, *near_ones))
        await it.replicas.resume()
        answers = await asyncio.gather(*waiting, *near_ones)
        assert {finish for finish, _ in answers} == {"stop"}
        assert HALF_WOKEN not in {said for _, said in answers}
        assert "engine_restarted" in {event.kind for event in it.events}


@pytest.mark.parametrize("count", [1, 2])
async def test_a_server_that_died_in_its_sleep_is_there_for_what_is_published_next(
    replicas: Callable[..., Any], tmp_path: Path, count: int
) -> None:
    async with replicas(count) as it:
        await it.replicas.pause()
        pid = it.engines[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while not any(event.kind == "replica_out" for event in it.events):
            await asyncio.sleep(0.01)
        directory = tmp_path / "a2"
        directory.mkdir()
        (directory / "adapter_config.json").write_text(json.dumps({"r": 8, "number": 2}))
        await it.replicas.publish(V2, directory)
        await it.replicas.resume()
        while not any(event.kind == "replica_back" for event in it.events):
            await asyncio.sleep(0.01)
        for engine in it.engines:
            assert V2 in engine.versions()
            assert (await asked(engine.base_url, "hi", V2))[0] == "stop"


async def test_a_replica_that_was_only_thought_dead_in_its_sleep_holds_calls_and_wakes(
    replicas: Callable[..., Any],
) -> None:
    async with replicas(1) as it:
        await it.replicas.pause()

        async def suspect() -> None:
            it.replicas._watching.out(it.replicas._members[0], "a connection broke")

        await it.replicas._there(suspect)
        before = await it.arrived()
        waiting = asyncio.create_task(it.ways["gateway"]("hi"))
        await it.until_arrived(before + 1)  # at the door of the one that is back
        assert not waiting.done()
        await it.replicas.resume()
        finish, said = await waiting
        assert finish == "stop"
        assert said != HALF_WOKEN
        assert [event.kind for event in it.events] == ["replica_out", "replica_back"]


async def test_replicas_that_cannot_sleep_let_requests_in_again(
    replicas: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(1) as it:
        cycle = it.engines[0]._shared._cycle

        async def refuse(server: Any) -> None:
            raise EngineError("no main memory")

        monkeypatch.setattr(cycle, "sleep", refuse)
        with pytest.raises(EngineError, match="no main memory"):
            await it.engines[0].pause()
        for way in it.ways.values():
            assert (await way("hi"))[0] == "stop"
