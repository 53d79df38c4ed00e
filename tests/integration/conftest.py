"""A gateway before a fake vLLM, and a tiny model; modules that want other ones define their own."""

from collections.abc import Iterator

import openai
import pytest
from fakes.vllm_server import FakeVLLM

from art_core.inference.gateway import Gateway


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    with FakeVLLM("hello there") as server:
        yield server


@pytest.fixture
def gateway(fake: FakeVLLM) -> Iterator[Gateway]:
    with Gateway(fake.base_url) as started:
        yield started


@pytest.fixture
def client(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A base model's directory."""
    from helpers.tiny import tiny_model  # PyTorch, which tests of gateways do without

    return str(tiny_model(tmp_path_factory.mktemp("base") / "model"))
