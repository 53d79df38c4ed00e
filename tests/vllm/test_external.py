"""A real vLLM as somebody else's server, and what it tells of itself."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from art_core.errors import EngineError
from art_core.inference.external import ExternalEngine
from art_core.inference.gateway import Gateway
from art_core.inference.replicas import ReplicaSet
from art_core.inference.vllm_metrics import ServingMonitor, metric_sources
from art_core.types import PolicyVersion

if TYPE_CHECKING:
    from conftest import Served

V0, V1, V2 = (PolicyVersion("guest", n) for n in range(3))


def ask(base_url: str, model: str, **more: Any) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Name three animals."}],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "return_token_ids": True,
        **more,
    }
    answer = httpx.post(f"{base_url}/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]


@pytest.fixture
def engine(served: "Served") -> Iterator[ExternalEngine]:
    engine = ExternalEngine(served.engine.base_url, served_model="guest", base_model="agent")
    yield engine
    asyncio.run(engine.close())


def test_a_real_vllm_shows_all_that_it_can(engine: ExternalEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asyncio.run(engine.start())
    can = engine.capabilities
    assert can.server.startswith("vLLM 0.")
    assert can.lacks == ()
    assert can.untrainable is None
    assert "serves agent@0, agent" in caplog.text


async def test_versions_of_a_guest_are_served_beside_the_hosts_and_taken_away_again(
    served: "Served", engine: ExternalEngine, tmp_path: Path
) -> None:
    adapter = served.adapters[PolicyVersion("agent", 1)]
    replicas = ReplicaSet([engine])
    await replicas.start()
    try:
        await replicas.publish(V0, None)
        await replicas.publish(V1, adapter)
        with pytest.raises(EngineError, match=r"must be able to read .*nowhere"):
            await replicas.publish(V2, tmp_path / "nowhere")
        assert replicas.versions() == (V0, V1)
        guest = await asyncio.to_thread(ask, replicas.base_url, "guest@1")
        host = await asyncio.to_thread(ask, served.engine.base_url, "agent@1")
        assert guest["choices"][0]["token_ids"] == host["choices"][0]["token_ids"]
        assert logprobs(guest) == pytest.approx(logprobs(host), abs=0.05)
        assert (await replicas.health()).ok
    finally:
        await replicas.close()
    names = {card["id"] for card in httpx.get(f"{served.engine.base_url}/models").json()["data"]}
    assert "guest@1" not in names
    assert {"agent@0", "agent@1"} <= names


def test_what_a_real_vllm_did_is_told_by_its_metrics(served: "Served") -> None:
    with ServingMonitor(metric_sources(served.engine)) as monitor, Gateway(served.engine.base_url) as gateway:
        monitor.window()
        for _ in range(2):
            answer = ask(gateway.base_url, "agent@0")
        told = monitor.window()
        metrics = httpx.get(f"{gateway.url}/metrics").text
    assert told["serving/generation_tokens_per_second"] > 0
    assert told["serving/prompt_tokens_per_second"] > 0
    assert 0 < told["serving/time_to_first_token_seconds_mean"] < 60
    assert 0 < told["serving/inter_token_latency_seconds_mean"] < 60
    assert 0 <= told["serving/prefix_cache_hit_rate"] <= 1
    assert {f"serving/{what}_max" for what in ("running", "waiting", "kv_cache_usage")} <= told.keys()
    assert told["serving/preemptions"] == 0
    sampled = 2 * answer["usage"]["completion_tokens"]
    assert f'art_gateway_completion_tokens_total{{replica="0",version="agent@0"}} {sampled:.1f}' in metrics
