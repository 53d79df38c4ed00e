"""The callback handler in LangGraph graphs: stock ChatOpenAI through the gateway, and models without one."""

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from operator import add
from pathlib import Path
from typing import Annotated, Any, TypedDict

import httpx
import pytest
from fakes.vllm_server import FakeVLLM, Reply, ToolCall, completion_ids, prompt_ids
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import FakeListLLM, GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, RetryPolicy, Send, interrupt
from pydantic import BaseModel

from art_core.capture import superseded
from art_core.errors import NoPolicyCallsError
from art_core.inference.endpoint import StaticEndpoint
from art_core.inference.gateway import Gateway
from art_core.recording import Rollout
from art_core.types import RolloutStatus, Step
from art_langgraph.calls import key_of_result
from art_langgraph.capturing import capture
from art_langgraph.chat_model import ChatART
from art_langgraph.handler import TrajectoryCallbackHandler

LONG = 240.0
"""Seconds that a rollout may wait for its calls: half of them passing says that it waited in vain."""


class State(TypedDict, total=False):
    topic: str
    said: Annotated[list[str], add]


class Said(TypedDict, total=False):
    said: Annotated[list[str], add]


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    with FakeVLLM(echo) as server:
        yield server


@pytest.fixture
def gateway(fake: FakeVLLM) -> Iterator[Gateway]:
    with Gateway(fake.base_url) as started:
        yield started


@pytest.fixture
def model(gateway: Gateway) -> ChatOpenAI:
    """Stock ChatOpenAI; nothing but its address is ours."""
    return stock(gateway.base_url)


def stock(base_url: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model="m@1", base_url=base_url, api_key="none", max_retries=0, **options)


def echo(request: dict[str, Any]) -> str:
    return f"re: {request['messages'][-1]['content']}"


def ask(model: ChatOpenAI) -> Callable[[State], State]:
    def call(state: State) -> State:
        return {"said": [str(model.invoke(state.get("topic", "hi")).content)]}

    return call


def one_node(node: Callable[..., Any], **options: Any) -> Any:
    builder = StateGraph(State, output_schema=Said)
    builder.add_node("work", node, **options)
    builder.add_edge(START, "work")
    builder.add_edge("work", END)
    return builder.compile(checkpointer=InMemorySaver())


def thread(name: str = "1") -> RunnableConfig:
    return {"configurable": {"thread_id": name}}


def exact(step: Step) -> bool:
    """Whether a step has the very tokens that the server sampled for its request."""
    return (
        step.trainable
        and step.tokens is not None
        and step.tokens.completion == completion_ids(step.message())
        and step.tokens.prompt == prompt_ids({"messages": step.messages})
    )


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


# -- other ways in -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_art_under_the_handler_is_recorded_once(fake: FakeVLLM, stream: bool) -> None:
    art = ChatART(StaticEndpoint(fake.base_url, "m@1"))
    with capture() as rollout:
        graph = one_node(ask(art))
        if stream:
            list(graph.stream({"topic": "tea"}, thread(), stream_mode="messages"))
        else:
            graph.invoke({"topic": "tea"}, thread())
    (step,) = rollout.steps
    assert exact(step)
    assert step.identity.node == "work"
    assert [s.name for s in rollout.snapshot().spans if s.kind == "llm"] == ["ChatART"]


def test_a_model_without_a_gateway_is_a_step_of_text_that_says_why() -> None:
    model = GenericFakeChatModel(messages=iter([AIMessage("yes", id="1")]))
    with capture() as rollout:
        one_node(
            lambda state: {"said": [str(model.invoke([("system", "s"), ("user", "u")]).content)]}
        ).invoke({}, thread())
    (step,) = rollout.steps
    assert step.messages == ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    assert step.message() == "yes"
    assert not step.trainable
    assert step.untrainable is not None
    assert "is not served through a gateway" in step.untrainable
    assert step.identity.node == "work"


def test_a_model_that_completes_text_is_a_step_too() -> None:
    with capture() as rollout:
        FakeListLLM(responses=["there"]).invoke("once")
    (step,) = rollout.steps
    assert (step.messages, step.message()) == (({"role": "user", "content": "once"},), "there")
    assert not step.trainable


def test_malformed_tool_calls_are_kept_at_the_level_of_text(fake: FakeVLLM) -> None:
    """C08."""
    fake.script(ToolCall("weather", '{"city": '))
    with capture() as rollout:
        stock(fake.base_url).invoke("hi")
    (step,) = rollout.steps
    assert step.response is not None
    assert step.response["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": '}


def test_a_cache_hit_is_a_step_without_tokens(fake: FakeVLLM, gateway: Gateway) -> None:
    """C02."""
    model = stock(gateway.base_url, cache=InMemoryCache())
    with capture() as rollout:
        model.invoke("tea")
        model.invoke("tea")
    asked, cached = rollout.steps
    assert exact(asked)
    assert cached.untrainable == "cache hit: the policy was not asked"
    assert cached.message() == "re: tea"
    assert len(fake.bodies) == 1


def test_all_choices_of_one_call_are_steps(fake: FakeVLLM, gateway: Gateway) -> None:
    fake.script(lambda request: ["first", "second"])
    with capture() as rollout:
        stock(gateway.base_url, n=2).generate([[HumanMessage("hi")]])
    assert [s.message() for s in rollout.steps] == ["first", "second"]
    assert len({s.call_id for s in rollout.steps}) == 1
    assert rollout.snapshot().faults == {}


def test_calls_under_a_rollouts_prefix_are_not_recorded_twice(gateway: Gateway) -> None:
    with capture() as rollout:
        stock(gateway.register(rollout)).invoke("tea")
    assert [s.message() for s in rollout.steps] == ["re: tea"]
    assert rollout.snapshot().faults == {"recorded_by_prefix": 1}


# -- the gateway in another process --------------------------------------------------------------------

SERVE = """
import sys
from art_core.inference.gateway import Gateway
with Gateway(sys.argv[1]) as gateway:
    print(gateway.base_url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def remote(fake: FakeVLLM) -> Iterator[str]:
    """The base URL of a gateway in a process of its own."""
    child = subprocess.Popen(
        [sys.executable, "-c", SERVE, fake.base_url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert child.stdout is not None
    try:
        yield child.stdout.readline().strip()
    finally:
        child.communicate(timeout=120)


async def test_completions_of_a_remote_gateway_are_fetched_before_the_rollout_ends(remote: str) -> None:
    model = stock(remote)
    async with capture() as rollout:
        for topic in "abc":
            await model.ainvoke(topic)
    with capture() as streamed:
        list(model.stream("d"))
    assert [s.message() for s in rollout.steps] == ["re: a", "re: b", "re: c"]
    assert all(exact(s) for s in (*rollout.steps, *streamed.steps))
    assert rollout.snapshot().faults == {}


def test_a_gateway_that_cannot_be_reached_leaves_a_step_that_names_it(remote: str) -> None:
    with capture(gateway="http://127.0.0.1:9") as rollout:
        stock(remote).invoke("tea")
    (step,) = rollout.steps
    assert step.message() == "re: tea"
    assert step.untrainable is not None
    assert "the gateway at http://127.0.0.1:9 did not answer" in step.untrainable
    assert rollout.snapshot().faults == {"unjoined_completions": 1}


# -- failures ------------------------------------------------------------------------------------------


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
