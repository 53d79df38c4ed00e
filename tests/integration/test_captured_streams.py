"""Captures inside generators, as servers stream answers: read in pieces, from anywhere, and left early."""

import asyncio
import contextvars
import gc
from collections.abc import AsyncIterator, Iterator
from operator import add
from typing import Annotated, Any, TypedDict

import pytest
from fakes.vllm_server import FakeVLLM
from helpers.chat_art import chat_for
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph

from art_core.recording import Rollout, current_rollout
from art_core.types import RolloutStatus
from art_langgraph import capture


class State(TypedDict, total=False):
    said: Annotated[list[str], add]


class Served:
    """A graph of two nodes, and what a server makes of it; remembers its rollouts."""

    def __init__(self, fake: FakeVLLM) -> None:
        fake.script("a few words in some chunks")
        chat = chat_for(fake)
        graph = StateGraph(State)
        graph.add_node("first", lambda state: {"said": [chat.invoke("one").text]})
        graph.add_node("second", self._second(chat))
        graph.add_edge(START, "first").add_edge("first", "second")
        self.graph = graph.compile()
        self.rollouts: list[Rollout] = []

    @staticmethod
    def _second(chat: Any) -> Any:
        async def second(state: State) -> State:
            return {"said": [(await chat.ainvoke("two")).text]}

        return second

    async def astream(self) -> AsyncIterator[Any]:
        async with capture() as rollout:
            self.rollouts.append(rollout)
            async for part in self.graph.astream({}, stream_mode=["messages", "updates"]):
                yield part


@pytest.fixture
def served(fake: FakeVLLM) -> Served:
    return Served(fake)


@pytest.fixture
def another() -> Iterator[Rollout]:
    """Another open rollout, so that no call is adopted by the only one."""
    rollout = Rollout()
    yield rollout
    assert not rollout.finish().steps


async def test_a_reader_who_leaves_ends_the_rollout(served: Served, fake: FakeVLLM, another: Rollout) -> None:
    async for _ in served.astream():
        break
    gc.collect()
    (rollout,) = served.rollouts
    for _ in range(1000):
        if rollout.ended:
            break
        await asyncio.sleep(0.01)
    trajectory = rollout.snapshot()
    assert trajectory.status is RolloutStatus.FAILED
    assert trajectory.failure is not None
    assert (trajectory.failure.cause, trajectory.failure.message[:15]) == ("cancelled", "its reader left")
    assert [s.identity.node for s in trajectory.steps] == ["first"]
    # The reader's own calls are not of the rollout that was left in its context.
    await ChatOpenAI(model="m@1", base_url=fake.base_url, api_key="none").ainvoke("mine")  # type: ignore[arg-type]
    assert len(rollout.steps) == 1
    assert rollout.snapshot().faults == {}


async def test_a_stream_whose_parts_are_read_by_tasks_of_their_own_is_captured_whole(
    served: Served, another: Rollout
) -> None:
    for _ in range(2):
        stream = served.astream()

        async def part(stream: Any = stream) -> Any:
            return await anext(stream, None)

        while await asyncio.create_task(part()) is not None:
            pass
    for rollout in served.rollouts:
        trajectory = rollout.snapshot()
        assert trajectory.status is RolloutStatus.FINISHED
        assert [s.identity.node for s in trajectory.steps] == ["first", "second"]
        assert all(s.trainable for s in trajectory.steps)
        assert trajectory.faults == {}


def test_a_sync_stream_that_is_read_in_contexts_of_its_own_is_captured_whole(
    fake: FakeVLLM, another: Rollout
) -> None:
    """So servers read sync generators: each part in a thread, with a copy of the context."""
    chat = chat_for(fake)
    graph = StateGraph(State)
    for name in ("first", "second"):
        graph.add_node(name, lambda state: {"said": [chat.invoke("hi").text]})
    graph.add_edge(START, "first").add_edge("first", "second")
    rollouts: list[Rollout] = []

    def stream() -> Iterator[Any]:
        with capture() as rollout:
            rollouts.append(rollout)
            yield from graph.compile().stream({}, stream_mode="updates")

    parts = stream()
    while contextvars.copy_context().run(next, parts, None) is not None:
        pass
    trajectory = rollouts[0].snapshot()
    assert trajectory.status is RolloutStatus.FINISHED
    assert [s.identity.node for s in trajectory.steps] == ["first", "second"]
    assert trajectory.faults == {}


def test_a_block_that_is_left_in_another_context_takes_nothing_of_that_ones_away() -> None:
    block = capture()
    rollout = contextvars.Context().run(block.__enter__)
    with capture() as mine:
        block.__exit__(None, None, None)
        assert current_rollout() is mine
    assert rollout.ended
    assert current_rollout() is None
