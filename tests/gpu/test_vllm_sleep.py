"""One GPU in turns, with real vLLM: sleep, train in the freed memory, wake, and answer as before.

    pytest tests/gpu/test_vllm_sleep.py --model DIR [--vllm-python PYTHON] -s

With ``ART_RESULTS=FILE`` the measured times, memory and canary differences are written there as JSON;
``ART_VLLM_ARGS`` are further arguments of vLLM.
"""

import asyncio
import json
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from art_core.config import EngineConfig, LoRAConfig
from art_core.inference.engine import EngineEvent
from art_core.inference.vllm import VLLMEngine
from art_core.inference.vllm_sleep import TOLERANCE, SleepCycle
from art_core.types import PolicyVersion

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LORA = LoRAConfig(rank=16, alpha=32)
SHARE = 0.6
CYCLES = 5


@pytest.fixture(scope="module")
def model_dir(request: pytest.FixtureRequest) -> Path:
    given = request.config.getoption("--model") or os.environ.get("GPU_MODEL")
    if given is None:
        pytest.skip("needs --model DIR (or the variable GPU_MODEL)")
    return Path(given)


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[PolicyVersion, Path]:
    """Versions 1 and 2: random adapters that change what the model says."""
    from art_core.training.peft_policy import PeftPolicy

    policy = PeftPolicy.load(str(model_dir), LORA, dtype="bfloat16", device="cuda")
    found: dict[PolicyVersion, Path] = {}
    for number in (1, 2):
        version = PolicyVersion("agent", number)
        torch.manual_seed(number)
        for parameter in policy.trainable_parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        found[version] = tmp_path_factory.mktemp("adapter") / str(number)
        policy.save_adapter(found[version])
    del policy
    torch.cuda.empty_cache()
    return found


@pytest.fixture(scope="module")
def engine(
    model_dir: Path,
    adapters: dict[PolicyVersion, Path],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VLLMEngine]:
    config = EngineConfig(
        colocate=True,
        gpu_memory_utilization=SHARE,
        max_model_len=2048,
        python=request.config.getoption("--vllm-python"),
        start_timeout=600,
        extra_args=tuple(shlex.split(os.environ.get("ART_VLLM_ARGS", ""))),
    )
    vllm = VLLMEngine(str(model_dir), config, LORA, "agent", tmp_path_factory.mktemp("logs"))
    asyncio.run(vllm.start())
    try:
        asyncio.run(vllm.publish(PolicyVersion("agent", 0), None))
        for version, directory in adapters.items():
            asyncio.run(vllm.publish(version, directory))
        yield vllm
    finally:
        asyncio.run(vllm.close())


def used_gib() -> float:
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) / 2**30


async def chat(vllm: VLLMEngine, version: PolicyVersion) -> dict[str, Any]:
    await vllm.availability.aready()
    body = {"model": version.name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 32}
    async with httpx.AsyncClient(timeout=120) as client:
        response = await client.post(f"{vllm.base_url}/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()


async def test_it_sleeps_and_answers_as_before_with_every_version(
    engine: VLLMEngine, adapters: dict[PolicyVersion, Path]
):
    """C42."""
    events: list[EngineEvent] = []
    engine.on_event = events.append
    server = engine._keeper.running()
    versions = [PolicyVersion("agent", 0), *adapters]
    canary = SleepCycle(EngineConfig(max_model_len=2048))
    first = {v: await canary.read(server, v) for v in versions}
    again = {v: await canary.read(server, v) for v in versions}
    noise = {v.name: first[v].difference(again[v]) for v in versions}
    assert max(noise.values()) < TOLERANCE, f"the canary is noisy before any sleep: {noise}"
    apart = first[versions[0]].difference(first[versions[1]])
    assert apart > 10 * TOLERANCE, f"an adapter must be told from the base model: {apart}"

    awake = used_gib()
    cycles: list[dict[str, float]] = []
    for _ in range(CYCLES):
        queued = [asyncio.create_task(chat(engine, v)) for v in versions]
        started = time.perf_counter()
        await engine.pause()
        slept = time.perf_counter()
        asleep = used_gib()
        # What the trainer does with it: take more than vLLM would have left, and give it back.
        free, total = torch.cuda.mem_get_info(0)
        taken = torch.ones(int(min(free, total * (1 - SHARE / 2)) * 0.8) // 4, device="cuda")
        assert float(taken[-1]) == 1.0
        held = asyncio.create_task(chat(engine, versions[1]))
        del taken
        before_wake = time.perf_counter()
        await engine.resume()
        woke = time.perf_counter()
        await held
        await asyncio.gather(*queued)
        cycles.append(
            {
                "pause_and_sleep_seconds": slept - started,
                "wake_and_check_seconds": woke - before_wake,
                "asleep_gib": asleep,
                "awake_gib": used_gib(),
            }
        )
        assert asleep < awake * 0.5, f"sleeping frees memory: {awake:.1f} GiB before, {asleep:.1f} GiB asleep"
    server = engine._keeper.running()
    after = {v.name: first[v].difference(await canary.read(server, v)) for v in versions}
    result = {
        "awake_gib": awake,
        "cycles": cycles,
        "canary_noise": noise,
        "canary_apart": apart,
        "canary_after_all_cycles": after,
        "tolerance": TOLERANCE,
        "events": [{"kind": e.kind, "message": e.message, "data": dict(e.data)} for e in events],
    }
    print(json.dumps(result, indent=2))
    if path := os.environ.get("ART_RESULTS"):
        Path(path).write_text(json.dumps(result, indent=2))
    assert max(after.values()) < TOLERANCE, f"after {CYCLES} cycles the answers differ: {after}"
    assert engine.versions() == tuple(versions)
