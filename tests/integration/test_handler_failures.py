"""The callback handler when calls fail, are cancelled, or come late."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from fakes.vllm_server import FakeVLLM
from helpers.stock_agents import State, echo, exact, one_node, stock, thread
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, StateGraph

from art_core.errors import NoPolicyCallsError
from art_core.inference.gateway import Gateway
from art_core.recording import Rollout
from art_core.types import RolloutStatus
from art_langgraph.calls import key_of_result
from art_langgraph.capturing import capture

LONG = 240.0
"""Seconds that a rollout may wait for its calls: half of them passing says that it waited in vain."""


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    with FakeVLLM(echo) as server:
        yield server


@pytest.fixture
def model(gateway: Gateway) -> ChatOpenAI:
    """Stock ChatOpenAI; nothing but its address is ours."""
    return stock(gateway.base_url)


@pytest.mark.parametrize("kind", ["429", "500", "drop", "garbage"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_fails_is_a_step_with_its_error(
    fake: FakeVLLM, model: ChatOpenAI, kind: str, stream: bool
) -> None:
    fake.fail(1.0, [kind])
    with pytest.raises(Exception, match=r"."), capture() as rollout:
        list(model.stream("tea")) if stream else model.invoke("tea")
    (step,) = rollout.steps
    assert step.error
    assert (step.response, step.tokens, step.trainable) == (None, None, False)
    trajectory = rollout.snapshot()
    assert trajectory.failure is not None
    assert (trajectory.status, trajectory.reward) == (RolloutStatus.FAILED, None)


def test_a_cut_stream_is_a_failed_step_and_no_whole_looking_one(fake: FakeVLLM, model: ChatOpenAI) -> None:
    fake.script("word " * 20)
    fake.fail(1.0, ["cut_stream"])
    with pytest.raises(Exception, match=r"."), capture() as rollout:
        list(model.stream("tea"))
    (step,) = rollout.steps
    assert step.error
    assert step.tokens is None


async def test_a_stream_that_its_reader_leaves_says_so(fake: FakeVLLM, model: ChatOpenAI) -> None:
    fake.script("word " * 20)
    fake.chunk_delay = 0.01
    async with capture() as rollout:
        stream = model.astream("tea")
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
    assert [s.error for s in rollout.steps] == ["the stream ended before the completion did"]


async def kept(gateway: Gateway, count: int) -> None:
    """Wait until the gateway has so many completions."""
    async with asyncio.timeout(120):
        while len(gateway.completions) < count:
            await asyncio.sleep(0.005)


async def test_a_stream_that_its_reader_leaves_has_its_tokens_where_the_gateway_has_all_of_it(
    gateway: Gateway, model: ChatOpenAI
) -> None:
    async with capture(drain=LONG) as rollout:
        stream = model.astream("tea")
        await anext(stream)
        await kept(gateway, 1)
        await stream.aclose()  # type: ignore[attr-defined]
    assert [exact(s) for s in rollout.steps] == [True]
    assert len(gateway.completions) == 0


async def test_a_stream_that_is_cut_takes_no_answer_that_another_one_is_still_reading(
    fake: FakeVLLM, gateway: Gateway, model: ChatOpenAI
) -> None:
    async def read(begun: asyncio.Event, go_on: asyncio.Event) -> tuple[Rollout, BaseException | None]:
        async with capture(drain=LONG) as rollout:
            stream = model.astream("tea " * 20)
            await anext(stream)
            begun.set()
            await go_on.wait()
            try:
                [_ async for _ in stream]
            except Exception as error:
                return rollout, error
        return rollout, None

    fake.fail(1.0, ["cut_stream"], times=1)
    fake.chunk_delay = 2.0
    begun, go_on = asyncio.Event(), asyncio.Event()
    cut = asyncio.create_task(read(begun, begun))
    await begun.wait()
    fake.chunk_delay = 0.0
    slow = asyncio.create_task(read(asyncio.Event(), go_on))  # the gateway has it before the other one is cut
    rollout, error = await cut
    assert error is not None
    assert [(bool(step.error), step.tokens) for step in rollout.steps] == [(True, None)]
    go_on.set()
    rollout, error = await slow
    assert error is None
    assert [step.untrainable for step in rollout.steps] == [None]
    assert [exact(step) for step in rollout.steps] == [True]


@pytest.mark.parametrize("problem", ["recursion", "tool", "timeout"])
async def test_a_rollout_that_raises_keeps_its_steps_and_has_no_reward(
    model: ChatOpenAI, problem: str
) -> None:
    """C10."""

    limit = asyncio.timeout(120)

    async def node(state: State) -> State:
        await model.ainvoke("tea")
        if problem == "tool":
            raise ValueError("broken tool")
        if problem == "timeout":
            limit.reschedule(asyncio.get_running_loop().time())  # now that the call has been answered
            await asyncio.Event().wait()
        return {"said": ["x"]}

    builder = StateGraph(State)
    builder.add_node("work", node)
    builder.add_edge(START, "work")
    builder.add_edge("work", "work")
    expected = {"recursion": GraphRecursionError, "tool": ValueError, "timeout": TimeoutError}[problem]
    rollout = Rollout()
    with pytest.raises(expected):
        async with capture() as rollout, limit:
            await builder.compile().ainvoke({}, {"recursion_limit": 3})
    trajectory = rollout.snapshot()
    assert trajectory.steps
    assert all(exact(s) for s in trajectory.steps)
    assert trajectory.failure is not None
    assert trajectory.failure.cause == ("timeout" if problem == "timeout" else "exception")
    assert (trajectory.status, trajectory.reward) == (RolloutStatus.FAILED, None)


async def test_a_cancelled_call_is_closed_as_cancelled_without_waiting(
    fake: FakeVLLM, model: ChatOpenAI
) -> None:
    fake.fail(1.0, ["stall"])
    began = time.monotonic()
    async with capture(drain=LONG) as rollout:
        call = asyncio.create_task(model.ainvoke("tea"))
        while not fake.bodies:
            await asyncio.sleep(0.005)
        call.cancel()
        await asyncio.wait({call})
    assert time.monotonic() - began < LONG / 2
    (step,) = rollout.steps
    assert step.error == "cancelled: the call never ended"
    assert rollout.snapshot().faults == {"cancelled_calls": 1}
    assert [s.status for s in rollout.snapshot().spans] == ["cancelled"]


async def test_a_call_that_its_own_task_gave_up_on_is_not_waited_for(
    fake: FakeVLLM, model: ChatOpenAI
) -> None:
    fake.fail(1.0, ["stall"])
    began = time.monotonic()

    async def give_up(limit: asyncio.Timeout) -> None:
        while not fake.bodies:
            await asyncio.sleep(0.005)
        limit.reschedule(asyncio.get_running_loop().time())

    limit = asyncio.timeout(LONG)
    giving_up = asyncio.create_task(give_up(limit))
    with pytest.raises(TimeoutError):
        async with capture(drain=LONG) as rollout, limit:
            await model.ainvoke("tea")
    await giving_up
    assert time.monotonic() - began < LONG / 2
    assert [s.error for s in rollout.steps] == ["cancelled: the call never ended"]


async def test_background_work_is_waited_for(fake: FakeVLLM, model: ChatOpenAI) -> None:
    tasks: list[asyncio.Task[Any]] = []

    async def node(state: State) -> State:
        tasks.append(asyncio.create_task(model.ainvoke("later")))
        while not fake.bodies:
            await asyncio.sleep(0.005)
        return {"said": ["x"]}

    with ExitStack() as held:
        held.enter_context(fake.holding())
        async with capture(drain=LONG) as rollout:
            await one_node(node).ainvoke({}, thread())
            assert rollout.steps == ()
            asyncio.get_running_loop().call_later(0.2, held.close)
    assert [exact(s) for s in rollout.steps] == [True]
    await tasks[0]


async def test_background_work_that_goes_on_is_counted(fake: FakeVLLM, model: ChatOpenAI) -> None:
    with fake.holding():
        async with capture(drain=0.05) as rollout:
            task = asyncio.create_task(model.ainvoke("later"))
            while not fake.bodies:
                await asyncio.sleep(0.005)
        (step,) = rollout.steps
        assert step.error == "still running when the rollout ended"
    await task
    assert rollout.snapshot().faults["unfinished_calls"] == 1
    assert len(rollout.steps) == 1


def test_a_rollout_without_policy_calls_says_where_they_went(gateway: Gateway) -> None:
    """C02."""
    other = GenericFakeChatModel(messages=iter([AIMessage("yes")]))
    with pytest.raises(NoPolicyCallsError, match="no policy of ours"), capture(require_policy_calls=True):
        other.invoke("hi")
    with pytest.raises(NoPolicyCallsError, match="no LLM call at all"), capture(require_policy_calls=True):
        pass
    cached = stock(gateway.base_url, cache=InMemoryCache())
    cached.invoke("tea")
    with pytest.raises(NoPolicyCallsError, match="cache"), capture(require_policy_calls=True) as rollout:
        cached.invoke("tea")
    trajectory = rollout.snapshot()
    assert trajectory.failure is not None
    assert (trajectory.failure.cause, trajectory.reward) == ("no_policy_calls", None)


def test_the_handlers_own_fault_reaches_the_log_and_the_rollout_but_not_the_graph(
    model: ChatOpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(response: Any) -> str | None:
        raise KeyError("a bug of ours")

    monkeypatch.setattr("art_langgraph.handler.key_of_result", broken)
    with caplog.at_level(logging.ERROR), capture() as rollout:
        assert model.invoke("tea").content == "re: tea"
        assert model.invoke("tea").content == "re: tea"
    assert rollout.snapshot().faults["handler_errors"] == 2
    assert caplog.text.count("the graph goes on (said once)") == 1
    assert key_of_result is not broken


def test_a_silenced_call_is_still_heard(model: ChatOpenAI) -> None:
    """C02."""

    def node(state: State) -> State:
        return {"said": [str(model.invoke("tea", {"callbacks": []}).content)]}

    with capture() as rollout:
        one_node(node).invoke({}, thread())
    (step,) = rollout.steps
    assert exact(step)
    assert step.identity.node == "work"


def test_without_a_capture_nothing_is_recorded_or_said(
    model: ChatOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    with capture() as rollout:
        pass
    assert model.invoke("tea").content == "re: tea"
    assert rollout.steps == ()
    assert [r for r in caplog.records if r.name.startswith("art_")] == []


def test_http_is_not_needed_for_a_gateway_of_this_process(
    model: ChatOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise httpx.ConnectError("no HTTP here")

    monkeypatch.setattr("art_core.inference.gateway_client.GatewayClient._read", refuse)
    with capture() as rollout:
        model.invoke("tea")
    assert [exact(s) for s in rollout.steps] == [True]
