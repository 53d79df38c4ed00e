"""Calls of ChatART that are still under way when their rollout ends."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from operator import add
from typing import Annotated, Any, TypedDict

import pytest
from fakes.vllm_server import FakeVLLM
from helpers.chat_art import chat_for
from langgraph.graph import START, StateGraph

from art_core.types import Scenario
from art_langgraph import ChatART, agather, capture

LONG = 60.0
"""Seconds: longer than anything here takes, unless it waits in vain."""


class State(TypedDict, total=False):
    said: Annotated[list[str], add]


@pytest.fixture
def chat(fake: FakeVLLM) -> ChatART:
    fake.script("an answer of a few words")
    return chat_for(fake, max_retries=0)


def one_node(node: Any) -> Any:
    return StateGraph(State).add_node("ask", node).add_edge(START, "ask").compile()


async def test_a_reader_who_leaves_a_graphs_stream_loses_no_call_of_a_node_that_goes_on(
    fake: FakeVLLM, chat: ChatART
) -> None:
    fake.chunk_delay = 0.01
    graph = one_node(lambda state: {"said": [chat.invoke("hi").text]})
    async with capture(drain=LONG) as rollout:
        async for _ in graph.astream({}, stream_mode="messages"):
            break
    (step,) = rollout.snapshot().steps
    assert step.trainable
    assert step.message() == "an answer of a few words"
    assert rollout.snapshot().faults == {}


async def test_a_call_that_a_timeout_cuts_off_is_a_step_that_says_so_and_no_second_one_later(
    fake: FakeVLLM, chat: ChatART, caplog: pytest.LogCaptureFixture
) -> None:
    """C10, C32."""
    ended = threading.Event()

    def ask(state: State) -> State:
        chat.invoke("first")
        held.enter_context(fake.holding())
        chat.invoke("second")
        ended.set()
        return {}

    with ExitStack() as held:
        groups = await agather(
            one_node(ask), [Scenario("a")], group_size=1, timeout=2, min_group_size=0, progress=False
        )
    (failed,) = groups.failed
    assert failed.failure is not None
    assert failed.failure.cause == "timeout"
    assert [s.error for s in failed.steps] == [None, "still running when the rollout ended"]
    assert [s.identity.node for s in failed.steps] == ["ask", "ask"]
    assert failed.faults == {"unfinished_calls": 1}
    await asyncio.to_thread(ended.wait, LONG)
    assert "had ended when one of its calls did" in caplog.text


@pytest.mark.parametrize("sync", [True, False])
async def test_a_stream_that_is_left_open_is_not_waited_for(
    fake: FakeVLLM, chat: ChatART, sync: bool
) -> None:
    began = time.monotonic()
    stream: Any
    if sync:
        with capture(drain=LONG) as rollout:
            stream = chat.stream("hi")
            left_of(stream)
    else:
        async with capture(drain=LONG) as rollout:
            stream = chat.astream("hi")
            while not (await anext(stream)).content:
                pass
    assert time.monotonic() - began < LONG / 2
    (step,) = rollout.snapshot().steps
    assert step.error == "the stream ended before the completion did"
    stream.close() if sync else await stream.aclose()
    assert rollout.steps == (step,)
    assert rollout.snapshot().faults == {}


def left_of(stream: Iterator[Any]) -> None:
    """Read until the first text has come."""
    while not next(stream).content:
        pass
