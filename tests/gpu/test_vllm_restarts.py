"""A real vLLM on a GPU under constant load: versions change, processes are killed, and it costs time alone.

    pytest tests/gpu/test_vllm_restarts.py --model DIR [--vllm-python PYTHON] -s

With ``ART_RESULTS=FILE`` what was measured is written there as JSON; ``ART_VLLM_ARGS`` are further arguments
of vLLM.
"""

import asyncio
import json
import os
import shlex
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from helpers.engine_endpoint import EngineEndpoint
from helpers.gpu_memory import gib_of_group

from art_core.config import EngineConfig, LoRAConfig
from art_core.inference.engine import EngineEvent
from art_core.inference.vllm import VLLMEngine
from art_core.tap import Exchange, async_keeping_client
from art_core.types import PolicyVersion

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LORA = LoRAConfig(rank=16, alpha=32)
PUBLISHES = 50
CLIENTS = 32
ADAPTERS = 4
"""Different ones; versions take them in turns."""


@pytest.fixture(scope="module")
def model_dir(request: pytest.FixtureRequest) -> Path:
    given = request.config.getoption("--model") or os.environ.get("GPU_MODEL")
    if given is None:
        pytest.skip("needs --model DIR (or the variable GPU_MODEL)")
    return Path(given)


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Random ones that change what the model says."""
    from art_core.training.peft_policy import PeftPolicy

    policy = PeftPolicy.load(str(model_dir), LORA, dtype="bfloat16", device="cuda")
    found: list[Path] = []
    for number in range(ADAPTERS):
        torch.manual_seed(number)
        for parameter in policy.trainable_parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        found.append(tmp_path_factory.mktemp("adapter") / str(number))
        policy.save_weights(found[-1])
    del policy
    torch.cuda.empty_cache()
    return found


class Load:
    """Clients that ask the current version again and again, as `ChatART` does, until they are stopped."""

    def __init__(self, endpoint: EngineEndpoint) -> None:
        self.endpoint = endpoint
        self.answered: Counter[PolicyVersion] = Counter()
        self.seconds: list[float] = []
        self._client = openai.AsyncOpenAI(
            base_url=endpoint.base_url,
            api_key="none",
            max_retries=0,
            http_client=async_keeping_client(CLIENTS + 1),  # type: ignore[arg-type]
        )

    async def ask(self, version: PolicyVersion, **sampling: Any) -> Exchange:
        """One call; the exchange holds its exact tokens."""
        endpoint = self.endpoint
        exchange = Exchange(endpoint.base_url, model=version.name, server=endpoint.availability)
        await self._client.chat.completions.create(
            model="agent",
            messages=[{"role": "user", "content": "Name three animals and say one thing about each."}],
            extra_headers=exchange.headers,
            **{"max_tokens": 128, **sampling},
        )
        return exchange

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            with self.endpoint.lease() as version:
                exchange = await self.ask(version)
            assert exchange.answer is not None
            assert exchange.answer["model"] == version.name
            self.answered[version] += 1
            self.seconds.append(time.monotonic() - began)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        clients = [asyncio.create_task(self._run()) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            failed = [c.exception() for c in clients if c.done()]
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            assert not failed, failed

    async def answers(self, more: int) -> None:
        """Wait for so many answers."""
        wanted = self.answered.total() + more
        while self.answered.total() < wanted:
            await asyncio.sleep(0.005)


def used_gib(vllm: VLLMEngine) -> float:
    assert vllm.pid is not None
    return gib_of_group(vllm.pid)


def logprobs_of(exchange: Exchange) -> list[float]:
    from art_core.capture import read_completion

    assert exchange.answer is not None
    (choice,) = read_completion(exchange.answer)
    assert choice.tokens is not None
    return [value for value in choice.tokens.logprobs if value is not None]


def processes_of(group: int, name: str) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(entry.name)) == group and name in (entry / "comm").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


async def test_versions_change_and_processes_die_under_load(
    model_dir: Path, adapters: list[Path], request: pytest.FixtureRequest, tmp_path: Path
):
    """C40, C43."""
    events: list[EngineEvent] = []
    config = EngineConfig(
        gpu_memory_utilization=0.4,
        max_model_len=2048,
        max_batch=128,
        python=request.config.getoption("--vllm-python"),
        start_timeout=600,
        extra_args=tuple(shlex.split(os.environ.get("ART_VLLM_ARGS", ""))),
    )
    engine = VLLMEngine(str(model_dir), config, LORA, "agent", tmp_path / "logs", on_event=events.append)
    endpoint = EngineEndpoint(engine, tmp_path / "checkpoints")
    began = time.monotonic()
    await engine.start()
    measured: dict[str, Any] = {"start_seconds": time.monotonic() - began}
    try:
        load = Load(endpoint)

        async def publish(number: int) -> float:
            shutil.copytree(adapters[number % ADAPTERS], endpoint.adapter_dir(number))
            before = time.monotonic()
            await endpoint.publish(number)
            await load.ask(endpoint.current_version(), max_tokens=1)
            return time.monotonic() - before

        await publish(1)
        publish_seconds: list[float] = []
        async with load.running():
            await load.answers(CLIENTS)
            for number in range(2, 2 + PUBLISHES):
                publish_seconds.append(await publish(number))
                await load.answers(CLIENTS // 4)
        publish_seconds.sort()
        measured["publish_until_answered_seconds"] = {
            "median": publish_seconds[PUBLISHES // 2],
            "max": publish_seconds[-1],
        }
        measured["answers"] = load.answered.total()
        measured["slowest_answer_seconds"] = max(load.seconds)

        version = endpoint.current_version()
        before = logprobs_of(await load.ask(version, temperature=0))
        memory = used_gib(engine)
        async with load.running():
            for name in ("", "VLLM::Engine"):
                await load.answers(CLIENTS)
                assert engine.pid is not None
                victims = processes_of(engine.pid, name) if name else [engine.pid]
                assert victims, f"no process is called {name}"
                restarts = len(events)
                os.kill(victims[0], signal.SIGKILL)
                while len(events) == restarts:
                    await asyncio.sleep(0.05)
                await load.answers(CLIENTS)
        assert [event.kind for event in events] == ["engine_restarted"] * 2
        measured["restart_seconds"] = [event.data["seconds"] for event in events]
        measured["restart_causes"] = [event.data["cause"] for event in events]
        after = logprobs_of(await load.ask(version, temperature=0))
        same = [abs(a - b) for a, b in zip(before, after, strict=False)]
        measured["logprob_difference_after_restarts"] = sum(same) / len(same)
        measured["memory_gib"] = [memory, used_gib(engine)]
        print(json.dumps(measured, indent=1))
        assert sum(same) / len(same) < 0.05
        assert abs(memory - used_gib(engine)) < 1.0
    finally:
        await engine.close()
        if path := os.environ.get("ART_RESULTS"):
            Path(path).write_text(json.dumps(measured, indent=1))
