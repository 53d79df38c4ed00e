"""A backend with a gateway: stock clients are captured, and replicas are trained for."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest
from fakes.vllm_interpreter import fake_interpreter
from helpers.embedded import MODEL, disturb, tiny_policy
from helpers.tiny import tiny_model
from langchain_openai import ChatOpenAI

from art_core import LocalBackend, TrainableModel
from art_core.config import EngineConfig, GuardrailConfig, TrainConfig
from art_core.errors import ConfigError
from art_core.inference.embedded import EmbeddedEngine
from art_core.inference.gateway_proxy import REPLICA_HEADER
from art_core.inference.replicas import ReplicaSet
from art_core.types import PolicyVersion, TrajectoryGroup
from art_langgraph import capture

TRAIN = TrainConfig(learning_rate=1e-3, guardrails=GuardrailConfig(max_kl=None))


async def test_a_stock_client_of_a_model_with_a_gateway_is_captured_and_trained_from(tmp_path: Path) -> None:
    base = str(tiny_model(tmp_path / "model"))
    backend = LocalBackend(
        root=tmp_path,
        gateway=True,
        kind="embedded",
        dtype="float32",
        max_model_len=512,
        sinks=["prometheus"],
    )
    async with TrainableModel(base_model=base, name="agent", lora_rank=4, train=TRAIN) as model:
        await model.aregister(backend)
        stock = ChatOpenAI(model="agent", base_url=model.base_url, api_key="none", max_tokens=8)
        trajectories = []
        for reward in (0.0, 1.0):
            async with capture() as rollout:
                await stock.ainvoke("hi")
                [c async for c in stock.astream("hi again")]
            assert [str(step.policy) for step in rollout.snapshot().steps] == ["agent@0"] * 2
            assert all(step.trainable for step in rollout.snapshot().steps)
            trajectories.append(rollout.snapshot().with_reward(reward))
        await model.atrain([TrajectoryGroup(trajectories[0].scenario, tuple(trajectories))])
        async with capture() as rollout:
            await stock.ainvoke("hi")
        assert str(rollout.snapshot().steps[0].policy) == "agent@1"
        assert httpx.get(f"{model.gateway.url}/health").json()["current_version"] == "agent@1"
        until, shown = time.monotonic() + 120, ""
        while 'art_policy_version{model="agent",project="default"} 1.0' not in shown:
            assert time.monotonic() < until, shown
            await asyncio.sleep(0.05)
            shown = httpx.get(f"{model.gateway.url}/metrics").text
        assert "art_gateway_requests_total" in shown


async def test_a_model_without_a_gateway_says_how_to_get_one(tmp_path: Path) -> None:
    base = str(tiny_model(tmp_path / "model"))
    async with TrainableModel(base_model=base, lora_rank=4) as model:
        await model.aregister(LocalBackend(root=tmp_path, kind="embedded", dtype="float32"))
        with pytest.raises(ConfigError, match="gateway=True"):
            _ = model.gateway


@pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX")
async def test_training_publishes_to_every_replica_that_the_backend_started(tmp_path: Path) -> None:
    base = str(tiny_model(tmp_path / "model"))
    backend = LocalBackend(
        root=tmp_path, kind="vllm", replicas=2, python=fake_interpreter(tmp_path / "fake", "answers")
    )
    async with TrainableModel(base_model=base, name="agent", lora_rank=4, train=TRAIN) as model:
        await model.aregister(backend)
        trajectories = []
        for reward in (0.0, 1.0):
            rollout_id = await model.astart_trajectory("s")
            answer = await model.chat.completions.acreate(messages=[{"role": "user", "content": "hi"}])
            assert answer.choices[0].message.content == "answered by agent@0"
            trajectories.append(await model.aend_trajectory(rollout_id, reward))
        await model.atrain([TrajectoryGroup(trajectories[0].scenario, tuple(trajectories))])
        health = httpx.get(f"{model.gateway.url}/health").json()
        assert health["status"] == "ok"
        assert [r["versions"] for r in health["replicas"]] == [["agent@0", "agent@1"]] * 2
        os.kill(model._registered.engine.engines[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        store = model._registered.store  # type: ignore[attr-defined]
        deadline = time.monotonic() + 120
        while not any(event.kind == "replica_back" for event in store.events()):
            assert time.monotonic() < deadline, "the replica was not brought back"
            # It may be back before anybody missed it: calls are what finds it out.
            await model.chat.completions.acreate(messages=[{"role": "user", "content": f"{time.time()}"}])
        assert [e.data["replica"] for e in store.events() if e.kind == "engine_restarted"] == ["0"]
        logs = sorted({path.parent.parent.name for path in tmp_path.rglob("vllm-*.log")})
        assert logs == ["replica-0", "replica-1"]


async def test_two_embedded_engines_answer_alike_and_one_takes_over_for_the_other(tmp_path: Path) -> None:
    """Real models: the same version on both gives the same tokens and logprobs."""
    policies = [tiny_policy(tmp_path / "model") for _ in range(2)]
    for policy in policies:
        disturb(policy, seed=7)
    config = EngineConfig(dtype="float32", max_model_len=512)
    engines = [EmbeddedEngine(policy, config, served_model=MODEL) for policy in policies]
    replicas = ReplicaSet(engines, patience=20)
    await replicas.start()
    try:
        await replicas.publish(PolicyVersion(MODEL, 0), None)
        async with openai.AsyncOpenAI(base_url=replicas.base_url, api_key="none", max_retries=0) as client:

            async def ask(number: int) -> tuple[str, list[int], list[float]]:
                raw = await client.chat.completions.with_raw_response.create(
                    model=f"{MODEL}@0",
                    messages=[{"role": "user", "content": "hello"}],
                    max_tokens=8,
                    temperature=0,
                    logprobs=True,
                    extra_body={"return_token_ids": True, "prompt_cache_key": f"k{number}"},
                )
                choice = raw.http_response.json()["choices"][0]
                logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
                return raw.headers[REPLICA_HEADER], choice["token_ids"], logprobs

            answers = [await ask(number) for number in range(8)]
            assert {replica for replica, _, _ in answers} == {"0", "1"}
            for _, ids, logprobs in answers:
                assert ids == answers[0][1]
                assert logprobs == pytest.approx(answers[0][2], abs=1e-4)
            await engines[0].close()
            later = [await ask(number) for number in range(8)]
            assert {replica for replica, _, _ in later} == {"1"}
            health = await replicas.health()
            assert health.ok
            assert "replica 0 is down" in health.detail
    finally:
        await replicas.close()
