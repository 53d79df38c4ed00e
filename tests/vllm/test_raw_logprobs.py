"""A real vLLM as it is by default: its log-probabilities are before temperature, and are known to be."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from art_core.config import EngineConfig, LoRAConfig
from art_core.inference.endpoint import StaticEndpoint
from art_core.inference.external import ExternalEngine
from art_core.inference.vllm import VLLMEngine
from art_core.training.samples import trajectory_samples
from art_core.types import PolicyVersion, Step
from art_langgraph import ChatART, capture

BASE = PolicyVersion("agent", 0)
TEMPERATURE = 0.5


@pytest.fixture(scope="module")
def raw(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExternalEngine]:
    config = EngineConfig(
        max_model_len=1024, max_batch=8, start_timeout=900, extra_args=("--logprobs-mode", "raw_logprobs")
    )
    vllm = VLLMEngine(
        str(model_dir), config, LoRAConfig(rank=4, alpha=8), "agent", tmp_path_factory.mktemp("raw") / "logs"
    )
    asyncio.run(vllm.start())
    try:
        engine = ExternalEngine(vllm.base_url, served_model="agent")
        asyncio.run(engine.start())
        yield engine
    finally:
        asyncio.run(vllm.close())


@torch.no_grad()
def expected(model_dir: Path, step: Step, temperature: float) -> torch.Tensor:
    """What the model itself gives to each sampled token at a temperature  [completion_tokens]."""
    from transformers import AutoModelForCausalLM

    assert step.tokens is not None
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    prompt, sampled = step.tokens.prompt, torch.tensor(step.tokens.completion)
    logits = model(torch.tensor([[*prompt, *sampled.tolist()]])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, sampled[:, None])[:, 0]


def test_logprobs_of_stock_vllm_are_before_temperature_and_are_known_to_be(
    raw: ExternalEngine, model_dir: Path
) -> None:
    assert raw.raw_logprobs
    policy = StaticEndpoint(raw.base_url, BASE.name, raw_logprobs=raw.raw_logprobs)
    chat = ChatART(policy, temperature=TEMPERATURE, max_completion_tokens=48, seed=1)
    with capture() as rollout:
        chat.invoke("Tell me a story about a miner and a bird.")
    trajectory = rollout.snapshot()
    (step,) = trajectory.steps
    assert step.tokens is not None
    told = torch.tensor([float(p or 0) for p in step.tokens.logprobs])
    before = (told - expected(model_dir, step, 1.0)).abs().mean()
    after = (told - expected(model_dir, step, TEMPERATURE)).abs().mean()
    print(f"mean difference to the model at temperature 1: {before:.4f}, at {TEMPERATURE}: {after:.4f} nats")
    assert before < 0.1
    assert after > 3 * before
    (sample,), _ = trajectory_samples(trajectory, {step.id: 1.0})
    assert set(sample.logprobs) == {None}
    assert sample.temperature == TEMPERATURE


def test_the_first_token_of_a_stream_comes_before_its_last(raw: ExternalEngine) -> None:
    chat = ChatART(StaticEndpoint(raw.base_url, BASE.name), streaming=True, max_completion_tokens=48, seed=1)
    with capture() as rollout:
        chat.invoke("Tell me a story about a miner and a bird.")
    (step,) = rollout.steps
    print(f"first token after {step.time_to_first_token} s, last after {step.duration} s")
    assert step.time_to_first_token is not None
    assert 0 < step.time_to_first_token < 0.7 * step.duration
