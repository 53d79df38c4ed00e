"""One GPU in turns, with real vLLM: sleep, train in the freed memory, wake, and answer as before.

    pytest tests/gpu/test_vllm_sleep.py --model DIR [--vllm-python PYTHON] -s

With ``ART_RESULTS=FILE`` the measured times, memory and the canaries' noise and differences are written there
as JSON, under the name of each test; ``ART_VLLM_ARGS`` are further arguments of vLLM.
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
from helpers.gpu_memory import gib_of_group

from art_core.config import EngineConfig, LoRAConfig
from art_core.inference.engine import EngineEvent
from art_core.inference.vllm import VLLMEngine
from art_core.inference.vllm_canary import APART_FACTOR, TOLERANCE, Check, Reference
from art_core.inference.vllm_sleep import SleepCycle
from art_core.types import PolicyVersion

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LORA = LoRAConfig(rank=16, alpha=32)
SHARE = 0.4
CYCLES = 5
BASE, V1, V2, ZERO = (PolicyVersion("agent", n) for n in range(4))
"""The base model, two adapters that change it, and one that does not."""


@pytest.fixture(scope="module")
def model_dir(request: pytest.FixtureRequest) -> Path:
    given = request.config.getoption("--model") or os.environ.get("GPU_MODEL")
    if given is None:
        pytest.skip("needs --model DIR (or the variable GPU_MODEL)")
    return Path(given)


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[PolicyVersion, Path]:
    """Versions 1 and 2: random adapters that change what the model says. Version 3: one of zeros."""
    from art_core.training.peft_policy import PeftPolicy

    policy = PeftPolicy.load(str(model_dir), LORA, dtype="bfloat16", device="cuda")
    found: dict[PolicyVersion, Path] = {}
    for version in (V1, V2, ZERO):
        torch.manual_seed(version.number)
        for parameter in policy.trainable_parameters():
            torch.nn.init.normal_(parameter, std=0.0 if version == ZERO else 0.05)
        found[version] = tmp_path_factory.mktemp("adapter") / str(version.number)
        policy.save_weights(found[version])
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
        asyncio.run(vllm.publish(BASE, None))
        for version, directory in adapters.items():
            asyncio.run(vllm.publish(version, directory))
        yield vllm
    finally:
        asyncio.run(vllm.close())


def used_gib(vllm: VLLMEngine) -> float:
    assert vllm.pid is not None
    return gib_of_group(vllm.pid)


async def chat(vllm: VLLMEngine, version: PolicyVersion) -> dict[str, Any]:
    await vllm.availability.aready()
    body = {"model": version.name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 32}
    async with httpx.AsyncClient(timeout=120) as client:
        response = await client.post(f"{vllm.base_url}/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()


def told(reference: Reference) -> dict[str, float]:
    return {"noise": reference.noise, "apart_from_base": reference.apart, "limit": reference.limit}


def found(check: Check) -> dict[str, Any]:
    return {"difference": check.difference, "lost": check.lost, "changed": check.changed}


def write(name: str, result: dict[str, Any]) -> None:
    print(name, json.dumps(result, indent=2))
    if path := os.environ.get("ART_RESULTS"):
        file = Path(path)
        all_results = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(all_results | {name: result}, indent=2))


async def test_a_lost_adapter_is_told_from_a_noisy_one(
    engine: VLLMEngine, adapters: dict[PolicyVersion, Path]
):
    """C42: the noise of this GPU's kernels, and a loss: an adapter of zeros under the name of another."""
    server = engine._keeper.running()
    versions = [BASE, *adapters]
    canary = SleepCycle(EngineConfig(max_model_len=2048))
    await canary.remember(server, BASE, adapters)
    before = {v.name: told(canary.before[v]) for v in versions}
    readings = {v: [await canary.read(server, v) for _ in range(8)] for v in versions}
    spread = {
        v.name: sorted(one.difference(other) for i, one in enumerate(of_one) for other in of_one[:i])
        for v, of_one in readings.items()
    }
    fixed = {
        v.name: sum(canary.before[v].check(r).difference > TOLERANCE for r in of_one)
        for v, of_one in readings.items()
    }
    still = await canary.check(server, versions)
    lost: list[Check] = []
    try:
        for version in (V1, V2):
            await server.unload(version.name)
            await server.load(version.name, adapters[ZERO])
            lost += await canary.check(server, [version])
    finally:
        for version in (V1, V2):
            await server.unload(version.name)
            await server.load(version.name, adapters[version])
    again = await canary.check(server, versions)
    result = {
        "before": before,
        "differences_between_8_readings": spread,
        "of_8_readings_beyond_the_tolerance": fixed,
        "unchanged": {c.version.name: found(c) for c in still},
        "lost": {c.version.name: found(c) for c in lost},
        "loaded_again": {c.version.name: found(c) for c in again},
        "tolerance": TOLERANCE,
    }
    write("noise_and_loss", result)
    assert canary.before[BASE].noise < TOLERANCE, f"the base model's canary is noisy: {before}"
    for version in (V1, V2):
        reference = canary.before[version]
        clear = max(TOLERANCE, APART_FACTOR * reference.noise)
        assert reference.apart > clear, f"{version} must be told from the base model: {before}"
    assert [c.version for c in still if c.changed] == [], f"nothing was done to them: {result['unchanged']}"
    assert [c.version for c in lost if c.changed] == [V1, V2], f"both are lost: {result['lost']}"
    assert [c.version for c in again if c.changed] == [], f"both are back: {result['loaded_again']}"


async def test_it_sleeps_and_answers_as_before_with_every_version(
    engine: VLLMEngine, adapters: dict[PolicyVersion, Path]
):
    """C42."""
    events: list[EngineEvent] = []
    engine.on_event = events.append
    server = engine._keeper.running()
    versions = [BASE, *adapters]
    canary = SleepCycle(EngineConfig(max_model_len=2048))
    await canary.remember(server, BASE, adapters)
    log = engine.log_path

    awake = used_gib(engine)
    cycles: list[dict[str, float]] = []
    for _ in range(CYCLES):
        queued = [asyncio.create_task(chat(engine, v)) for v in versions]
        started = time.perf_counter()
        await engine.pause()
        slept = time.perf_counter()
        asleep = used_gib(engine)
        # What the trainer does with it: take most of what vLLM gave up, and give it back.
        taken = torch.ones(int((awake - asleep) * 0.8 * 2**30) // 4, device="cuda")
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
                "awake_gib": used_gib(engine),
            }
        )
        assert asleep < awake * 0.5, f"sleeping frees memory: {awake:.1f} GiB before, {asleep:.1f} GiB asleep"
    server = engine._keeper.running()
    after = await canary.check(server, versions)
    result = {
        "awake_gib": awake,
        "cycles": cycles,
        "canary_before": {v.name: told(canary.before[v]) for v in versions},
        "canary_after_all_cycles": {c.version.name: found(c) for c in after},
        "tolerance": TOLERANCE,
        "events": [{"kind": e.kind, "message": e.message, "data": dict(e.data)} for e in events],
    }
    write("cycles", result)
    assert [c.version for c in after if c.changed] == [], f"after {CYCLES} cycles the answers differ: {after}"
    assert events == [], "what was loaded again is as it was, and noise restarts nothing"
    assert engine.log_path == log
    assert engine.versions() == tuple(versions)
