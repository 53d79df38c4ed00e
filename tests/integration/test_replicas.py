"""Several engines as one. Real processes of a fake vLLM, real HTTP, real graphs."""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fakes.vllm_interpreter import fake_interpreter
from helpers.rollout_graphs import chat_graph, length

from art_core.config import EngineConfig, LoRAConfig
from art_core.errors import EngineError, StoreError
from art_core.inference.endpoint import StaticEndpoint
from art_core.inference.engine import EngineEvent
from art_core.inference.gateway_proxy import REPLICA_HEADER
from art_core.inference.gateway_routing import SPREAD, ReplicaState
from art_core.inference.replicas import ReplicaSet
from art_core.inference.vllm import VLLMEngine
from art_core.types import PolicyVersion, Scenario
from art_langgraph import agather

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


class Running:
    """A started set of engines that are real processes, and what it told of itself."""

    client: openai.AsyncOpenAI

    def __init__(
        self,
        tmp_path: Path,
        count: int = 2,
        latency: float = 0.0,
        *,
        replaces: bool = False,
        **settings: Any,
    ) -> None:
        self.events: list[EngineEvent] = []
        self.python = fake_interpreter(tmp_path / "fake", "answers", latency=latency)
        config = EngineConfig(python=self.python, **settings)
        self.engines = [
            VLLMEngine("org/model", config, LoRAConfig(rank=8), "agent", tmp_path / f"logs{n}")
            for n in range(count)
        ]
        self.set = ReplicaSet(self.engines, replaces=replaces, on_event=self.events.append)

    @property
    def busy(self) -> list[int]:
        return [replica.busy for replica in self.set.replicas]

    @property
    def kinds(self) -> Counter[str]:
        return Counter(event.kind for event in self.events)

    async def take_down(self, number: int) -> None:
        """Kill it, and let its restart take a while."""
        script = self.python.read_text()
        self.python.write_text(script.replace("exec '", "sleep 3\nexec '"))
        self.kill(number)
        await until(lambda: self.set.replicas[number].state is ReplicaState.DOWN)
        self.python.write_text(script)

    def kill(self, number: int) -> None:
        pid = self.engines[number].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def names(self, number: int) -> list[str]:
        return [card["id"] for card in httpx.get(f"{self.engines[number].base_url}/models").json()["data"]]

    def all_up(self) -> bool:
        return all(replica.state is ReplicaState.UP for replica in self.set.replicas)

    async def ask(self, text: str = "hi", model: str = "agent@0", **options: Any) -> tuple[str, str]:
        """An answer, and the replica that gave it."""
        raw = await self.client.chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": text}], **options
        )
        return str(raw.parse().choices[0].message.content), raw.headers[REPLICA_HEADER]


@asynccontextmanager
async def running(
    tmp_path: Path, count: int = 2, latency: float = 0.0, **settings: Any
) -> AsyncIterator[Running]:
    replicas = Running(tmp_path, count, latency, **settings)
    await replicas.set.start()
    replicas.client = openai.AsyncOpenAI(base_url=replicas.set.base_url, api_key="none", max_retries=0)
    try:
        await replicas.set.publish(V0, None)
        yield replicas
    finally:
        await replicas.client.close()
        await replicas.set.close()


async def rollouts(replicas: Running, count: int = 64, calls: int = 4) -> Any:
    policy = StaticEndpoint(replicas.set.base_url, "agent@0")
    return await agather(
        chat_graph(policy, calls=calls),
        [Scenario(id=f"s-{n}", inputs={"topic": f"topic {n}"}) for n in range(count // 4)],
        group_size=4,
        reward=length,
        model=policy,
    )


async def test_a_replica_killed_under_load_loses_no_rollout_and_is_brought_back(tmp_path: Path) -> None:
    async with running(tmp_path, latency=0.1) as replicas:
        await replicas.set.publish(V1, adapter(tmp_path / "a1"))

        async def kill() -> None:
            await until(lambda: replicas.set.replicas[0].busy > 4)
            replicas.kill(0)

        killing = asyncio.create_task(kill())
        gathered = await rollouts(replicas)
        await killing
        trajectories = [t for group in gathered for t in group]
        assert len({t.id for t in trajectories}) == 64
        for trajectory in trajectories:
            assert [step.message() for step in trajectory.steps] == ["answered by agent@0"] * 4
            assert all(step.trainable for step in trajectory.steps)
            assert trajectory.reward == 4
        await until(replicas.all_up)
        assert replicas.kinds["replica_out"] == replicas.kinds["replica_back"] == 1
        assert replicas.kinds["engine_restarted"] == 1
        assert {"agent@0", "agent@1"} <= set(replicas.names(0))
        back = [await replicas.ask(f"question {n}", "agent@1") for n in range(20)]
        assert {said for said, _ in back} == {"answered by agent@1"}
        assert {replica for _, replica in back} == {"0", "1"}


async def test_the_calls_of_a_rollout_stay_on_one_replica_and_the_load_is_even(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (held := tmp_path / "held").touch()
    monkeypatch.setenv("FAKE_HELD", str(held))
    async with running(tmp_path) as replicas:
        gathering = asyncio.create_task(rollouts(replicas))
        await until(lambda: sum(replicas.busy) == 64)
        assert max(replicas.busy) <= SPREAD * 64 / 2
        held.unlink()
        await gathering
        await replicas.ask()
        text = httpx.get(f"{replicas.set.gateway.url}/metrics").text
        counts = [
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith("art_gateway_requests_total{")
        ]
        assert len(counts) == 2
        assert sum(counts) == 64 * 4 + 1
        # Sequential calls of one rollout, whose words differ, always meet the same replica.
        for rollout in range(8):
            header = {"x-art-rollout": f"t-{rollout}"}
            places = {(await replicas.ask(f"{n}", extra_headers=header))[1] for n in range(6)}
            assert len(places) == 1


async def test_a_version_is_on_every_replica_when_publishing_returns(tmp_path: Path) -> None:
    async with running(tmp_path) as replicas:
        await replicas.set.publish(V1, adapter(tmp_path / "a1"))
        assert all("agent@1" in replicas.names(n) for n in (0, 1))
        assert replicas.set.versions() == (V0, V1)
        await replicas.set.retire(V1)
        assert not any("agent@1" in replicas.names(n) for n in (0, 1))
        with pytest.raises(EngineError, match="agent@1 is not served; served: agent@0"):
            await replicas.set.retire(V1)


async def test_what_a_replica_missed_while_it_was_down_is_published_when_it_is_back(tmp_path: Path) -> None:
    async with running(tmp_path) as replicas:
        await replicas.take_down(0)
        await replicas.set.publish(V1, adapter(tmp_path / "a1"))
        assert "agent@1" in replicas.names(1)
        await until(replicas.all_up)
        assert "agent@1" in replicas.names(0)


async def test_a_version_that_no_replica_takes_is_an_error_and_is_not_served(tmp_path: Path) -> None:
    async with running(tmp_path) as replicas:
        broken = tmp_path / "broken"
        broken.mkdir()
        with pytest.raises(EngineError, match=r"no replica took agent@1: .*not a PEFT adapter directory"):
            await replicas.set.publish(V1, broken)
        assert replicas.set.versions() == (V0,)
        assert replicas.all_up()
        await replicas.set.publish(V1, adapter(tmp_path / "a1"))


async def test_a_drained_replica_ends_what_it_has_and_gets_nothing_new(tmp_path: Path) -> None:
    async with running(tmp_path, latency=1.0) as replicas:
        under_way: list[asyncio.Task[tuple[str, str]]] = []
        while min(r.busy for r in replicas.set.replicas) == 0:  # a stalled machine may miss the first ones
            under_way += [asyncio.create_task(replicas.ask(f"question {n}")) for n in range(16)]
            with suppress(AssertionError):
                await until(lambda: min(r.busy for r in replicas.set.replicas) > 0, seconds=2)
        await replicas.set.drain("0")
        assert replicas.set.replicas[0].busy == 0
        assert {replica for _, replica in await asyncio.gather(*under_way)} == {"0", "1"}
        await replicas.set.publish(V1, adapter(tmp_path / "a1"))
        later = await asyncio.gather(*(replicas.ask(f"question {n}") for n in range(16)))
        assert {replica for _, replica in later} == {"1"}
        health = httpx.get(f"{replicas.set.gateway.url}/health").json()
        assert health["status"] == "degraded"
        assert [r["state"] for r in health["replicas"]] == ["draining", "up"]
        await replicas.set.restore("0")
        assert "agent@1" in replicas.names(0)
        again = await asyncio.gather(*(replicas.ask(f"question {n}", "agent@1") for n in range(16)))
        assert {replica for _, replica in again} == {"0", "1"}
        with pytest.raises(EngineError, match="no replica is named 'x'; there are 0, 1"):
            await replicas.set.drain("x")


async def test_a_publication_that_is_cancelled_while_a_replica_is_drained_leaves_none_drained(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, latency=1.0, replaces=True) as replicas:
        under_way: list[asyncio.Task[tuple[str, str]]] = []
        while not replicas.set.replicas[0].busy:
            under_way += [asyncio.create_task(replicas.ask(f"question {n}")) for n in range(8)]
            with suppress(AssertionError):
                await until(lambda: replicas.set.replicas[0].busy > 0, seconds=2)
        publishing = asyncio.create_task(replicas.set.publish(V1, adapter(tmp_path / "a1")))
        await until(lambda: replicas.set.replicas[0].state is ReplicaState.DRAINING)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        await asyncio.gather(*under_way)
        await until(replicas.all_up, seconds=10)
        assert replicas.set.versions() == (V0,)


async def test_closing_that_is_cancelled_ends_every_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as replicas:
        gateway = replicas.set.gateway
        closing, go_on, close = threading.Event(), threading.Event(), gateway.close

        def slowly() -> None:
            closing.set()
            assert go_on.wait(60)
            close()

        monkeypatch.setattr(gateway, "close", slowly)
        ending = asyncio.create_task(replicas.set.close())
        assert await asyncio.to_thread(closing.wait, 60)
        ending.cancel()
        await asyncio.wait({ending}, timeout=0.5)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert [engine.versions() for engine in replicas.engines] == [(), ()]
        for engine in replicas.engines:
            assert not (await engine.health()).ok


async def test_a_drained_replica_that_dies_comes_back_drained(tmp_path: Path) -> None:
    async with running(tmp_path) as replicas:
        await replicas.set.drain("0")
        await replicas.take_down(0)
        await until(lambda: replicas.kinds["replica_back"] == 1)
        assert replicas.set.replicas[0].state is ReplicaState.DRAINING
        assert {(await replicas.ask(f"{n}"))[1] for n in range(8)} == {"1"}
        await replicas.set.restore("0")
        assert replicas.all_up()


async def test_a_replica_comes_back_though_whoever_is_told_of_it_fails(tmp_path: Path) -> None:
    """As the record does when its disk is full."""

    def refuse(event: EngineEvent) -> None:
        raise StoreError("the disk is full")

    async with running(tmp_path) as replicas:
        replicas.set.on_event = refuse
        await replicas.take_down(0)
        await until(replicas.all_up, seconds=20)


async def test_a_call_waits_while_no_replica_is_up(tmp_path: Path) -> None:
    async with running(tmp_path, 1) as replicas:
        await replicas.take_down(0)
        said, _ = await replicas.ask()
        assert said == "answered by agent@0"


async def test_a_replica_that_missed_the_end_of_a_pause_takes_calls_when_it_is_back(tmp_path: Path) -> None:
    async with running(tmp_path) as replicas:
        paused: list[int] = []
        for number, engine in enumerate(replicas.engines):
            resume = engine.resume

            async def noted(number: int = number, resume: Any = resume) -> None:
                await resume()
                paused.remove(number)

            engine.resume = noted  # type: ignore[method-assign]
        await replicas.set.pause()
        paused[:] = [0, 1]
        await replicas.take_down(0)
        await replicas.set.resume()
        assert paused == [0]
        await until(replicas.all_up)
        assert paused == []


async def test_when_every_replica_is_dead_for_good_calls_end_and_say_why(tmp_path: Path) -> None:
    async with running(tmp_path, max_restarts=0) as replicas:
        for number in (0, 1):
            replicas.kill(number)
        await until(lambda: replicas.kinds["replica_lost"] == 2)
        with pytest.raises(openai.InternalServerError, match=r"no replica could answer.*SIGKILL"):
            await replicas.ask()
        health = await replicas.set.health()
        assert not health.ok
        assert "SIGKILL" in health.detail
        with pytest.raises(EngineError, match="no replica is up"):
            await replicas.set.publish(V1, adapter(tmp_path / "a1"))


async def test_an_engine_that_does_not_start_is_named_and_the_others_are_ended(tmp_path: Path) -> None:
    config = EngineConfig(python=fake_interpreter(tmp_path / "good", "answers"))
    dying = EngineConfig(python=fake_interpreter(tmp_path / "bad", "dies"))
    engines = [
        VLLMEngine("org/model", each, LoRAConfig(rank=8), "agent", tmp_path / "logs")
        for each in (config, dying)
    ]
    replicas = ReplicaSet(engines)
    with pytest.raises(EngineError, match=r"(?s)replica 1 did not start: .*the weights are cursed"):
        await replicas.start()
    assert not (await engines[0].health()).ok
    await replicas.close()
