"""An embedded engine with a tiny model, and what it is made to say."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import pytest
import torch
from helpers.embedded import serving, tiny_policy
from openai import AsyncOpenAI

from art_core.inference.embedded import scheduler
from art_core.inference.embedded.sampling import Draw, Sampled
from art_core.training.peft_policy import PeftPolicy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PeftPolicy:
    return tiny_policy(tmp_path_factory.mktemp("llama"))


@pytest.fixture
async def client(policy: PeftPolicy) -> AsyncGenerator[AsyncOpenAI]:
    async with serving(policy) as (_, client):
        yield client


@pytest.fixture
async def http(policy: PeftPolicy) -> AsyncGenerator[httpx.AsyncClient]:
    async with (
        serving(policy) as (engine, _),
        httpx.AsyncClient(base_url=engine.base_url.removesuffix("/v1"), timeout=60) as http,
    ):
        yield http


@pytest.fixture
def says(policy: PeftPolicy, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the model say a text, and end."""

    def script(text: str) -> list[int]:
        ids: list[int] = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [*ids, policy.tokenizer.eos_token_id]  # type: ignore[list-item]
        rest = iter(ids)

        def scripted(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Sampled]:
            return [Sampled(next(rest), -0.5) for _ in draws]

        monkeypatch.setattr(scheduler, "sample", scripted)
        return ids

    return script
