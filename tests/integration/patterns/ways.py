"""The ways in, opened: a chat model whose calls end up in a rollout."""

from collections.abc import Generator
from contextlib import contextmanager

from fakes.vllm_server import FakeVLLM
from integration.patterns.compare import Way
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from art_core.inference.endpoint import StaticEndpoint
from art_core.inference.gateway import Gateway
from art_core.recording import Rollout, recording
from art_core.types import PolicyVersion
from art_langgraph import ChatART, capture

POLICY = PolicyVersion("policy", 3)


@contextmanager
def way_in(way: Way, server: FakeVLLM, rollout: Rollout) -> Generator[BaseChatModel]:
    """A chat model whose calls are recorded into the rollout."""
    endpoint = StaticEndpoint(server.base_url, POLICY.name)
    match way.name:
        case "chatart":
            with recording(rollout):
                yield ChatART(endpoint)
        case "chatart_and_handler":
            with capture(rollout=rollout):
                yield ChatART(endpoint)
        case "gateway":
            with Gateway(endpoint) as gateway, capture(rollout=rollout):
                yield stock(gateway.base_url)
        case "handler":
            with capture(rollout=rollout):
                yield stock(server.base_url)
        case other:
            raise ValueError(other)


def stock(base_url: str) -> BaseChatModel:
    return ChatOpenAI(model=POLICY.name, base_url=base_url, api_key=SecretStr("none"))
