"""The callback handler in LangGraph graphs: stock ChatOpenAI through the gateway."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, TypedDict

import pytest
from fakes.vllm_server import FakeVLLM, Reply, ToolCall, completion_ids
from helpers.stock_agents import Said, State, ask, echo, exact, one_node, stock, thread
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.types import Command, RetryPolicy, Send, interrupt
from pydantic import BaseModel

from art_core.capture import superseded
from art_core.inference.gateway import Gateway
from art_core.recording import Rollout
from art_core.types import RolloutStatus
from art_langgraph.capturing import capture
from art_langgraph.handler import TrajectoryCallbackHandler


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    with FakeVLLM(echo) as server:
        yield server


@pytest.fixture
def model(gateway: Gateway) -> ChatOpenAI:
    """Stock ChatOpenAI; nothing but its address is ours."""
    return stock(gateway.base_url)


# -- graphs --------------------------------------------------------------------------------------------


def test_a_call_in_a_graph_has_its_exact_tokens_and_its_node(model: ChatOpenAI) -> None:
    with capture() as rollout:
        one_node(ask(model)).invoke({"topic": "tea"}, thread())
    (step,) = rollout.steps
    assert exact(step)
    assert step.message() == "re: tea"
    assert step.identity.node == "work"
    assert step.identity.namespace.startswith("work:")
    assert step.identity.graph_step == 1
    assert rollout.snapshot().status is RolloutStatus.FINISHED
    assert rollout.snapshot().faults == {}


@pytest.mark.parametrize("way", ["invoke", "stream", "messages", "events", "batch"])
async def test_each_async_way_to_run_a_graph_gives_each_call_once(model: ChatOpenAI, way: str) -> None:
    async def node(state: State) -> State:
        return {"said": [str((await model.ainvoke("tea")).content)]}

    graph = one_node(node)
    async with capture() as rollout:
        match way:
            case "invoke":
                await graph.ainvoke({}, thread())
            case "stream":
                assert [c async for c in graph.astream({}, thread(), stream_mode="updates")]
            case "messages":
                assert [c async for c in graph.astream({}, thread(), stream_mode="messages")]
            case "events":
                assert [e async for e in graph.astream_events({}, thread(), version="v2")]
            case _:
                await graph.abatch([{}, {}], [thread("1"), thread("2")])
    assert len(rollout.steps) == (2 if way == "batch" else 1)
    assert all(exact(step) for step in rollout.steps)
    assert {step.identity.node for step in rollout.steps} == {"work"}


def test_branches_of_a_subgraph_are_told_apart(model: ChatOpenAI) -> None:
    inner = StateGraph(State, output_schema=Said)
    inner.add_node("inner", ask(model))
    inner.add_edge(START, "inner")
    outer = StateGraph(State)
    outer.add_node("work", inner.compile())
    outer.add_conditional_edges(START, lambda state: [Send("work", {"topic": t}) for t in "abc"], ["work"])
    with capture() as rollout:
        outer.compile().invoke({})
    steps = rollout.steps
    assert sorted(s.message() for s in steps) == ["re: a", "re: b", "re: c"]
    assert all(exact(s) for s in steps)
    assert len({s.identity.namespace for s in steps}) == 3
    assert {s.identity.node for s in steps} == {"inner"}
    assert all("|inner:" in s.identity.namespace for s in steps)


@pytest.mark.parametrize("arguments", ['{"city":"Paris"}', '{"city": '])
def test_an_agents_tool_calls_are_kept_as_they_were_sampled(
    fake: FakeVLLM, model: ChatOpenAI, arguments: str
) -> None:
    """C03, C08."""

    @tool
    def weather(city: str) -> str:
        """Tell the weather."""
        return f"sunny in {city}"

    reply = Reply(tool_calls=(ToolCall("weather", arguments),))
    fake.script([reply, "done"])
    agent = create_agent(model, [weather])
    with capture() as rollout:
        agent.invoke({"messages": [{"role": "user", "content": "hi"}]})
    first = rollout.steps[0]
    assert first.response is not None
    assert first.response["tool_calls"][0]["function"]["arguments"] == arguments
    assert first.tokens is not None
    assert first.tokens.completion == completion_ids(reply)
    assert len(first.tokens.completion) == first.usage["completion_tokens"]
    assert first.trainable
    assert first.tools[0]["function"]["name"] == "weather"


def test_a_retried_node_keeps_both_attempts_and_marks_the_first(model: ChatOpenAI) -> None:
    """C11."""
    tries: list[int] = []

    def flaky(state: State) -> State:
        answer = str(model.invoke("go").content)
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("not yet")
        return {"said": [answer]}

    policy = RetryPolicy(initial_interval=0.001, jitter=False, retry_on=RuntimeError)
    with capture() as rollout:
        one_node(flaky, retry_policy=policy).invoke({}, thread())
    first, second = rollout.steps
    assert (first.identity.attempt, second.identity.attempt) == (1, 2)
    assert first.identity.namespace == second.identity.namespace
    assert superseded(rollout.steps) == {first.id}


def test_a_resumed_node_supersedes_what_it_did_before_the_interrupt(model: ChatOpenAI) -> None:
    """C11."""

    def node(state: State) -> State:
        answer = str(model.invoke("draft").content)
        return {"said": [answer, interrupt("may I?")]}

    graph = one_node(node)
    with capture() as rollout:
        graph.invoke({}, thread())
        graph.invoke(Command(resume="yes"), thread())
    first, second = rollout.steps
    assert superseded(rollout.steps) == {first.id}
    assert exact(second)
    node_spans = [s for s in rollout.snapshot().spans if s.name == "work"]
    assert [s.status for s in node_spans] == ["interrupted", "ok"]
    assert [s.attempt for s in node_spans] == [1, 2]
    assert node_spans[0].outputs[0]["interrupt"] == "may I?"
    runs = [s for s in rollout.snapshot().spans if s.parent_id is None]
    assert runs[1].inputs == {"resume": "yes"}


def test_a_planners_tokens_belong_to_the_planners_prompt_alone(model: ChatOpenAI) -> None:
    """C07."""

    def planner(state: State) -> State:
        return {"said": [str(model.invoke("plan").content)]}

    def executor(state: State) -> State:
        return {"said": [str(model.invoke(f"do {state['said'][0]}").content)]}

    builder = StateGraph(State)
    builder.add_sequence([planner, executor])
    builder.add_edge(START, "planner")
    with capture() as rollout:
        builder.compile().invoke({})
    plan, act = rollout.steps
    assert [plan.identity.node, act.identity.node] == ["planner", "executor"]
    assert exact(plan)
    assert exact(act)
    assert plan.tokens is not None
    assert act.tokens is not None
    assert len(act.tokens.completion) == len(completion_ids("re: do re: plan"))


# -- structured output ---------------------------------------------------------------------------------


class Point(BaseModel):
    x: int


SCHEMAS: dict[str, Any] = {
    "pydantic": Point,
    "typed dict": TypedDict("Pt", {"x": int}),
    "json schema": {
        "title": "pt",
        "description": "a point",
        "type": "object",
        "properties": {"x": {"type": "integer"}},
    },
}


@pytest.mark.parametrize("parses", [True, False])
@pytest.mark.parametrize("method", ["function_calling", "json_mode", "json_schema"])
@pytest.mark.parametrize("schema", list(SCHEMAS))
def test_structured_output_is_a_step_whether_it_parses_or_not(
    fake: FakeVLLM, model: ChatOpenAI, schema: str, method: Any, parses: bool
) -> None:
    """C01."""
    text = '{"x": 1}' if parses else '{"x": one'
    name = {"pydantic": "Point", "typed dict": "Pt", "json schema": "pt"}[schema]
    reply = Reply(tool_calls=(ToolCall(name, text),)) if method == "function_calling" else Reply(text)
    fake.script(reply)
    structured = model.with_structured_output(SCHEMAS[schema], method=method)
    with capture() as rollout:
        try:
            structured.invoke("where?")
        except Exception:
            assert not parses
    (step,) = rollout.steps
    assert step.tokens is not None
    assert step.tokens.completion == completion_ids(reply)
    assert step.trainable


@pytest.mark.parametrize("parses", [True, False])
@pytest.mark.parametrize("method", ["function_calling", "json_mode", "json_schema"])
async def test_structured_output_in_a_stream_is_a_step_too(
    fake: FakeVLLM, model: ChatOpenAI, method: Any, parses: bool
) -> None:
    """C01."""
    text = '{"x": 1}' if parses else '{"x": one'
    reply = Reply(tool_calls=(ToolCall("Point", text),)) if method == "function_calling" else Reply(text)
    fake.script(reply)
    structured = model.with_structured_output(Point, method=method, include_raw=True)
    async with capture() as rollout:
        try:
            assert [c async for c in structured.astream("where?")]
        except ValueError:
            assert not parses
    (step,) = rollout.steps
    assert step.tokens is not None
    assert step.tokens.completion == completion_ids(reply)
    assert step.trainable


def test_an_answer_that_was_cut_by_its_length_is_a_step(fake: FakeVLLM, gateway: Gateway) -> None:
    """C01."""
    fake.script('{"x": 12345}')
    structured = stock(gateway.base_url, max_tokens=4).with_structured_output(Point)
    with pytest.raises(Exception, match="length"), capture() as rollout:
        structured.invoke("where?")
    (step,) = rollout.steps
    assert step.finish_reason == "length"
    assert step.tokens is not None
    assert len(step.tokens.completion) == 4


# -- many at once --------------------------------------------------------------------------------------


async def test_forty_rollouts_of_one_graph_never_mix(fake: FakeVLLM, model: ChatOpenAI) -> None:
    """C05."""
    fake.latency = 0.005

    async def first(state: State) -> State:
        return {"said": [str((await model.ainvoke(f"{state['topic']} one")).content)]}

    def second(state: State) -> State:  # a sync node: LangGraph runs it in a thread
        return {"said": [str(model.invoke(f"{state['topic']} two").content)]}

    builder = StateGraph(State)
    builder.add_sequence([first, second])
    builder.add_edge(START, "first")
    graph = builder.compile()

    async def one(number: int) -> Rollout:
        async with capture() as rollout:
            await graph.ainvoke({"topic": f"t{number}"})
        return rollout

    rollouts = await asyncio.gather(*(one(n) for n in range(40)))
    for number, rollout in enumerate(rollouts):
        assert [s.message() for s in rollout.steps] == [f"re: t{number} one", f"re: t{number} two"]
        assert all(exact(s) for s in rollout.steps)
        assert rollout.snapshot().faults == {}


async def test_one_handler_passed_by_hand_serves_many_rollouts(model: ChatOpenAI) -> None:
    """C05."""
    from art_core.recording import recording

    handler = TrajectoryCallbackHandler()
    graph = one_node(ask(model))

    async def one(number: int) -> Rollout:
        rollout = Rollout()
        with recording(rollout):
            await graph.ainvoke({"topic": f"t{number}"}, {"callbacks": [handler], **thread(str(number))})
            await handler.adrain(rollout)
            await rollout.afinish()
        return rollout

    rollouts = await asyncio.gather(*(one(n) for n in range(10)))
    assert [[s.message() for s in r.steps] for r in rollouts] == [[f"re: t{n}"] for n in range(10)]


def test_a_handler_bound_to_a_rollout_needs_no_context(model: ChatOpenAI) -> None:
    rollout = Rollout()
    handler = TrajectoryCallbackHandler(rollout)
    worker = threading.Thread(target=model.invoke, args=("tea", {"callbacks": [handler]}))
    worker.start()
    worker.join()
    handler.drain(rollout)
    assert [s.message() for s in rollout.finish().steps] == ["re: tea"]
