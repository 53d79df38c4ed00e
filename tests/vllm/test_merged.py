"""Merged weights on a real vLLM of their own, which reads each version in place."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from art_core.config import EngineConfig, LoRAConfig
from art_core.errors import EngineError
from art_core.inference.engine import EngineEvent
from art_core.inference.merging import merge
from art_core.inference.vllm import VLLMEngine
from art_core.inference.vllm_canary import TOLERANCE
from art_core.inference.vllm_sleep import SleepCycle
from art_core.types import PolicyVersion

BASE, V1, V2 = (PolicyVersion("agent", n) for n in range(3))
QUESTION = [{"role": "user", "content": "Name three animals and say one thing about each."}]


@pytest.fixture(scope="module")
def merged_engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    config = EngineConfig(publish="merged", max_model_len=1024, max_batch=16, start_timeout=900)
    logs = tmp_path_factory.mktemp("merged-engine") / "logs"
    engine = VLLMEngine(str(model_dir), config, LoRAConfig(rank=4, alpha=8), "agent", logs)
    asyncio.run(engine.start())
    try:
        asyncio.run(engine.publish(BASE, None))
        yield engine
    finally:
        asyncio.run(engine.close())


def ask(engine: VLLMEngine, version: PolicyVersion, seed: int = 0) -> httpx.Response:
    body = {"model": version.name, "messages": QUESTION, "max_tokens": 24, "seed": seed}
    body |= {"logprobs": True, "return_token_ids": True}
    return httpx.post(f"{engine.base_url}/chat/completions", json=body, timeout=300)


@torch.no_grad()
def difference(model: Any, body: dict[str, Any]) -> float:
    """Mean absolute difference between an answer's logprobs and a model's, in nats."""
    prompt, choice = body["prompt_token_ids"], body["choices"][0]
    sampled = torch.tensor(choice["token_ids"])
    logits = model(torch.tensor([prompt + choice["token_ids"]])).logits[0, len(prompt) - 1 : -1].float()
    expected = torch.log_softmax(logits, -1).gather(1, sampled[:, None])[:, 0]
    found = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
    return float((found - expected).abs().mean())


def test_merged_versions_answer_with_the_trainers_merged_weights(
    merged_engine: VLLMEngine,
    model_dir: Path,
    adapters: dict[PolicyVersion, Path],
    tmp_path_factory: pytest.TempPathFactory,
):
    """Three versions under constant requests; each answer's tokens are scored by its own weights."""
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("reference")
    models = {BASE: AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)}
    for version in (V1, V2):
        path = merge(model_dir, adapters[version], directory / version.name)
        models[version] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)

    events: list[EngineEvent] = []
    merged_engine.on_event = events.append
    log = merged_engine.log_path
    answers: list[tuple[PolicyVersion, httpx.Response]] = []
    serving, done = [BASE], threading.Event()

    def client(number: int) -> None:
        seed = number
        while not done.is_set():
            version = serving[-1]
            answers.append((version, ask(merged_engine, version, seed)))
            seed += 10

    clients = [threading.Thread(target=client, args=(n,)) for n in range(3)]
    for thread in clients:
        thread.start()
    try:
        for version in (V1, V2):
            while sum(v == serving[-1] and r.status_code == 200 for v, r in answers) < 3:
                done.wait(0.05)
            asyncio.run(merged_engine.publish(version, adapters[version]))
            serving.append(version)
            assert merged_engine.versions() == (version,)
        while sum(v == V2 for v, _ in answers) < 6:
            done.wait(0.05)
    finally:
        done.set()
        for thread in clients:
            thread.join()

    assert merged_engine.log_path == log, "it was reloaded in place, not restarted"
    assert events == []
    answered: dict[PolicyVersion, list[dict[str, Any]]] = {BASE: [], V1: [], V2: []}
    for version, response in answers:
        if response.status_code == 404:  # it came when its version had been replaced
            assert version != V2
            continue
        assert response.json()["model"] == version.name
        answered[version].append(response.json())
    for version, bodies in answered.items():
        mine = [difference(models[version], body) for body in (*bodies[:2], *bodies[-2:])]
        assert sum(mine) / len(mine) < 0.2, f"{version}: {mine}"
        for other in models.keys() - {version}:
            theirs = [difference(models[other], body) for body in (bodies[0], bodies[-1])]
            assert max(mine) < 0.5 * min(theirs), f"{version}: {mine} of its own, {theirs} of {other}"


def test_a_version_that_was_replaced_is_unknown_and_never_comes_back(
    merged_engine: VLLMEngine, adapters: dict[PolicyVersion, Path]
):
    refused = ask(merged_engine, V1)
    assert refused.status_code == 404
    assert "agent@1" in refused.json()["error"]["message"]
    with pytest.raises(EngineError, match="one version at a time, agent@2"):
        asyncio.run(merged_engine.publish(V1, adapters[V1]))
    names = {card["id"] for card in httpx.get(f"{merged_engine.base_url}/models").json()["data"]}
    assert names == {"agent@2", "agent"}


async def test_the_door_holds_requests_before_the_engine_and_lets_our_own_canaries_through(
    merged_engine: VLLMEngine,
):
    """What a server does that sleeps, as far as one on a CPU can: nothing waits inside its engine."""
    server = merged_engine._keeper.running()
    version = merged_engine.versions()[0]
    cycle = SleepCycle(EngineConfig(max_model_len=1024))
    before = await cycle.read(server, version)
    await server.shut_door(1.0)
    refused = await asyncio.to_thread(ask, merged_engine, version)
    assert refused.status_code == 503
    assert "EngineConfig.hold_timeout" in refused.json()["error"]["message"]
    await server.shut_door(300.0)
    waiting = [asyncio.create_task(asyncio.to_thread(ask, merged_engine, version, n)) for n in range(3)]
    assert (await cycle.read(server, version)).difference(before) < TOLERANCE
    metrics = await server.metrics()
    inside = [line.split()[-1] for line in metrics.splitlines() if line.startswith("vllm:num_requests_")]
    assert inside, metrics
    assert {float(count) for count in inside} == {0.0}
    assert not any(task.done() for task in waiting)
    await server.open_door()
    assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200, 200]
