"""ChatART before the fake server, and what it recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fakes.vllm_server import FakeVLLM, Reply, completion_ids, prompt_ids
from langchain_core.messages import (
    AIMessageChunk,
)
from langchain_core.runnables import Runnable

from art_core.inference.endpoint import StaticEndpoint
from art_core.recording import Rollout, recording
from art_core.types import Step
from art_langgraph import ChatART


def chat_for(server: FakeVLLM, **kwargs: Any) -> ChatART:
    return ChatART(StaticEndpoint(server.base_url, "m@1"), **{"max_retries": 0, **kwargs})


@contextmanager
def recorded(**kwargs: Any) -> Iterator[Rollout]:
    with recording(Rollout(**kwargs)) as rollout:
        yield rollout


def merged(whole: Any, chunk: Any) -> Any:
    if isinstance(whole, dict) and isinstance(chunk, dict):
        return {**whole, **chunk}
    return whole + chunk if isinstance(whole, AIMessageChunk) else chunk


async def ainvoke(model: Runnable[Any, Any], text: str) -> Any:
    return await model.ainvoke(text)


async def astream(model: Runnable[Any, Any], text: str) -> Any:
    whole = None
    async for chunk in model.astream(text):
        whole = merged(whole, chunk)
    return whole


def stream(model: Runnable[Any, Any], text: str) -> Any:
    whole = None
    for chunk in model.stream(text):
        whole = merged(whole, chunk)
    return whole


def only(rollout: Rollout) -> Step:
    (step,) = rollout.steps
    return step


def exact(step: Step, server: FakeVLLM, reply: Reply | str) -> None:
    assert step.trainable, step.untrainable or step.error
    assert step.tokens is not None
    assert step.tokens.completion == completion_ids(reply)
    assert step.tokens.prompt == prompt_ids(server.bodies[-1])
    assert len(step.tokens.completion) == step.usage["completion_tokens"]
