"""An embedded engine on a tiny model, for tests over real HTTP."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from helpers.tiny import Arch, tiny_model
from openai import AsyncOpenAI

from art_core.config import EngineConfig, LoRAConfig
from art_core.inference.embedded import EmbeddedEngine
from art_core.training.peft_policy import PeftPolicy
from art_core.types import PolicyVersion

MODEL = "tiny"


def tiny_policy(path: Path, arch: Arch = "llama") -> PeftPolicy:
    """A float32 policy whose adapter already does something."""
    policy = PeftPolicy.load(str(tiny_model(path, arch)), LoRAConfig(rank=4), dtype="float32")
    disturb(policy, seed=1)
    return policy


def disturb(policy: PeftPolicy, seed: int) -> None:
    """Change the training adapter, as an update would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.trainable_parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


@asynccontextmanager
async def serving(
    policy: PeftPolicy, *, versions: Sequence[int] = (0,), **settings: Any
) -> AsyncGenerator[tuple[EmbeddedEngine, AsyncOpenAI]]:
    """A started engine with versions published, and a client of it."""
    settings = {"dtype": "float32", "max_model_len": 1024, **settings}
    engine = EmbeddedEngine(policy, EngineConfig(**settings), served_model=MODEL)
    await engine.start()
    try:
        for number in versions:
            await engine.publish(PolicyVersion(MODEL, number), None)
        async with AsyncOpenAI(base_url=engine.base_url, api_key="none", max_retries=0, timeout=60) as client:
            yield engine, client
    finally:
        await engine.close()
        for version in (*engine.versions(), *(PolicyVersion(MODEL, n) for n in versions)):
            policy.drop(version.name)


def forward_logprobs(
    policy: PeftPolicy,
    version: str,
    prompt: Sequence[int],
    completion: Sequence[int],
    temperature: float = 1.0,
) -> list[float]:
    """What the trainer's plain forward pass says of a completion's tokens."""
    with torch.no_grad(), policy.using(version):
        hidden = policy.hidden_states(input_ids=torch.tensor([[*prompt, *completion]])).last_hidden_state
        logprobs = torch.log_softmax(
            policy.head(hidden[0, len(prompt) - 1 : -1]).float() / temperature, dim=-1
        )
    return [logprobs[i, token].item() for i, token in enumerate(completion)]
