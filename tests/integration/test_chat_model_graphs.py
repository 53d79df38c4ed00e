"""ChatART inside LangGraph graphs: each call is a step of its own rollout, under its own identity."""

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

import pytest
from fakes.vllm_server import FakeVLLM, completion_ids
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ContextThreadPoolExecutor
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, RetryPolicy, Send, interrupt

from art_core.capture import superseded
from art_core.inference.endpoint import StaticEndpoint
from art_core.recording import Rollout, recording, set_current_rollout
from art_langgraph import ChatART, capture


class State(TypedDict, total=False):
    task: str
    plan: str
    said: Annotated[list[str], lambda a, b: [*a, *b]]


def echo(request: dict[str, Any]) -> str:
    return f"re: {request['messages'][-1]['content']}"


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM(echo) as fake:
        yield fake


@pytest.fixture(autouse=True)
def only_rollouts_of_this_test() -> None:
    gc.collect()  # those that earlier tests left open


@pytest.fixture
def chat(server: FakeVLLM) -> ChatART:
    return ChatART(StaticEndpoint(server.base_url, "m@1"), max_retries=0)


def two_nodes(chat: ChatART, *, sync: bool) -> Any:
    """A planner, and an executor that quotes the plan."""

    def planner(state: State) -> State:
        return {"plan": str(chat.invoke(f"plan {state['task']}").content)}

    def executor(state: State) -> State:
        return {"said": [str(chat.invoke(f"do {state['plan']}").content)]}

    async def aplanner(state: State) -> State:
        return {"plan": str((await chat.ainvoke(f"plan {state['task']}")).content)}

    async def aexecutor(state: State) -> State:
        return {"said": [str((await chat.ainvoke(f"do {state['plan']}")).content)]}

    graph = StateGraph(State)
    graph.add_node("planner", planner if sync else aplanner)
    graph.add_node("executor", executor if sync else aexecutor)
    graph.add_edge(START, "planner").add_edge("planner", "executor")
    return graph.compile()


@pytest.mark.parametrize("sync", [True, False], ids=["sync nodes", "async nodes"])
@pytest.mark.parametrize("mode", ["ainvoke", "messages", "astream_events"])
async def test_forty_concurrent_rollouts_of_one_graph_hold_their_own_steps(
    chat: ChatART, server: FakeVLLM, sync: bool, mode: str
):
    """C05."""
    server.latency = 0.02
    graph = two_nodes(chat, sync=sync)

    async def run(number: int) -> Rollout:
        rollout = Rollout()
        with recording(rollout):
            given = {"task": f"t{number}"}
            if mode == "ainvoke":
                await graph.ainvoke(given)
            elif mode == "messages":
                async for _ in graph.astream(given, stream_mode="messages"):
                    pass
            else:
                async for _ in graph.astream_events(given, version="v2"):
                    pass
        return rollout

    rollouts = await asyncio.gather(*(run(number) for number in range(40)))
    for number, rollout in enumerate(rollouts):
        plan = f"re: plan t{number}"
        assert [(s.identity.node, s.messages[0]["content"], s.message()) for s in rollout.steps] == [
            ("planner", f"plan t{number}", plan),
            ("executor", f"do {plan}", f"re: do {plan}"),
        ]
        for step in rollout.steps:
            assert step.tokens is not None
            assert step.tokens.completion == completion_ids(step.message())
            assert step.rollout_id == rollout.id
            assert step.identity.run_id is not None
            assert step.identity.namespace.startswith(f"{step.identity.node}:")
        assert not rollout.finish().faults


def test_a_plan_is_trained_under_the_planners_prompt_alone(chat: ChatART):
    """C07."""
    with recording(Rollout()) as rollout:
        two_nodes(chat, sync=True).invoke({"task": "x"})
    planned, executed = rollout.steps
    assert planned.tokens is not None
    assert executed.tokens is not None
    plan = completion_ids(planned.message())[:-1]
    quoted = bytes(executed.tokens.prompt[:-1])
    assert bytes(plan) in quoted, "the executor's prompt quotes the plan"
    assert planned.tokens.completion[:-1] == plan
    sampled = [s.tokens.completion for s in rollout.steps if s.tokens]
    assert sampled.count(planned.tokens.completion) == 1


def test_branches_share_a_node_and_not_a_namespace(chat: ChatART):
    def fan(state: State) -> list[Send]:
        return [Send("work", {"task": str(i)}) for i in range(4)]

    def work(state: State) -> State:
        chat.invoke(f"first {state['task']}")
        chat.invoke(f"second {state['task']}")
        return {"said": []}

    graph = StateGraph(State)
    graph.add_node("work", work)
    graph.add_conditional_edges(START, fan, ["work"])
    with recording(Rollout()) as rollout:
        graph.compile().invoke({"said": []})
    calls = Counter((s.identity.namespace, s.identity.call_index) for s in rollout.steps)
    assert len({s.identity.namespace for s in rollout.steps}) == 4
    assert len(calls) == 8
    for step in rollout.steps:
        assert step.messages[0]["content"].startswith(("first", "second")[step.identity.call_index])


@pytest.mark.parametrize("sync", [True, False], ids=["sync node", "async node"])
@pytest.mark.parametrize("inside", [False, True], ids=["graph", "subgraph"])
async def test_a_retried_node_counts_its_attempts(chat: ChatART, sync: bool, inside: bool):
    """C11."""
    tries = Counter[str]()

    def after(text: str) -> State:
        tries["work"] += 1
        if tries["work"] < 3:
            raise ConnectionError("again")
        return {"said": [text]}

    def work(state: State) -> State:
        return after(str(chat.invoke("try").content))

    async def awork(state: State) -> State:
        return after(str((await chat.ainvoke("try")).content))

    policy = RetryPolicy(max_attempts=4, initial_interval=0.001, jitter=False)
    graph: Any = StateGraph(State)
    graph.add_node("work", work if sync else awork, retry_policy=policy)
    graph = graph.add_edge(START, "work").compile()
    if inside:
        outer: Any = StateGraph(State)
        outer.add_node("outer", graph)
        graph = outer.add_edge(START, "outer").compile()
    with recording(Rollout()) as rollout:
        await graph.ainvoke({"task": "x"})
    steps = rollout.steps
    assert [(s.identity.attempt, s.identity.call_index) for s in steps] == [(1, 0), (2, 0), (3, 0)]
    assert len({s.identity.namespace for s in steps}) == 1
    assert superseded(steps) == {steps[0].id, steps[1].id}


@pytest.mark.parametrize("sync", [True, False], ids=["sync node", "async node"])
@pytest.mark.parametrize("inside", [False, True], ids=["graph", "subgraph"])
async def test_a_resumed_node_is_a_later_attempt(chat: ChatART, sync: bool, inside: bool):
    """C11."""

    def ask(state: State) -> State:
        draft = str(chat.invoke("draft").content)
        answer = interrupt("is it good?")
        return {"said": [str(chat.invoke(f"final {draft} {answer}").content)]}

    async def aask(state: State) -> State:
        draft = str((await chat.ainvoke("draft")).content)
        answer = interrupt("is it good?")
        return {"said": [str((await chat.ainvoke(f"final {draft} {answer}")).content)]}

    graph: Any = StateGraph(State)
    graph.add_node("ask", ask if sync else aask)
    graph = graph.add_edge(START, "ask").compile(checkpointer=None if inside else InMemorySaver())
    if inside:
        outer: Any = StateGraph(State)
        outer.add_node("outer", graph)
        graph = outer.add_edge(START, "outer").compile(checkpointer=InMemorySaver())
    config: RunnableConfig = {"configurable": {"thread_id": "1"}}
    with recording(Rollout()) as rollout:
        await graph.ainvoke({"task": "x"}, config)
        await graph.ainvoke(Command(resume="yes"), config)
    steps = rollout.steps
    assert [(s.identity.attempt, s.identity.call_index) for s in steps] == [(1, 0), (2, 0), (2, 1)]
    assert superseded(steps) == {steps[0].id}


def test_a_rollout_that_raises_keeps_its_steps(chat: ChatART):
    """C10."""

    def loop(state: State) -> State:
        chat.invoke("round")
        return {"said": []}

    graph = StateGraph(State)
    graph.add_node("loop", loop)
    graph.add_edge(START, "loop").add_conditional_edges("loop", lambda s: "loop", ["loop", END])
    with recording(Rollout()) as rollout, pytest.raises(GraphRecursionError):
        graph.compile().invoke({"said": []}, {"recursion_limit": 5})
    assert len(rollout.steps) == 5
    assert all(s.trainable for s in rollout.steps)


def in_thread(work: Any, *args: Any) -> None:
    thread = threading.Thread(target=work, args=args)
    thread.start()
    thread.join()


def run_in_node(node: Any) -> None:
    graph = StateGraph(State)
    graph.add_node("node", node)
    graph.add_edge(START, "node").compile().invoke({"said": []})


def test_a_thread_without_context_is_adopted_by_the_only_open_rollout(chat: ChatART):
    def node(state: State) -> State:
        in_thread(chat.invoke, "hi")
        return {"said": []}

    with recording(Rollout()) as rollout:
        run_in_node(node)
    assert [s.message() for s in rollout.steps] == ["re: hi"]
    assert rollout.finish().faults == {"adopted_calls": 1}


def test_a_pool_that_copies_contexts_keeps_rollouts_and_nodes_apart(chat: ChatART):
    def node(state: State) -> State:
        with ContextThreadPoolExecutor() as pool:
            return {"said": [answer.text for answer in pool.map(chat.invoke, ["one", "two"])]}

    other = Rollout()
    with recording(Rollout()) as rollout:
        run_in_node(node)
    assert sorted(s.message() for s in rollout.steps) == ["re: one", "re: two"]
    assert {s.identity.node for s in rollout.steps} == {"node"}
    assert sorted(s.identity.call_index for s in rollout.steps) == [0, 1]
    assert not rollout.finish().faults
    assert not other.finish().steps


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a capture"])
async def test_generate_takes_no_config_and_is_still_placed_in_its_node(chat: ChatART, inside: bool):
    messages = [[HumanMessage("one")], [HumanMessage("two")]]

    def node(state: State) -> State:
        chat.generate(messages)
        return {"said": []}

    async def anode(state: State) -> State:
        await chat.agenerate(messages)
        return {"said": []}

    graph = StateGraph(State).add_node("node", node).add_node("anode", anode)
    graph.add_edge(START, "node").add_edge("node", "anode")
    rollout = Rollout()
    with capture(rollout=rollout) if inside else recording(rollout):
        await graph.compile().ainvoke({"said": []})
    assert [s.identity.node for s in rollout.steps] == ["node", "node", "anode", "anode"]
    assert [s.identity.call_index for s in rollout.steps] == [0, 1, 0, 1]
    assert len({s.identity.namespace for s in rollout.steps}) == 2


def test_a_thread_that_got_the_nodes_config_keeps_its_identity(chat: ChatART):
    def node(state: State, config: RunnableConfig) -> State:
        in_thread(chat.invoke, "hi", config)
        return {"said": []}

    other = Rollout()
    with recording(Rollout()) as rollout:
        graph = StateGraph(State).add_node("node", node).add_edge(START, "node").compile()
        graph.invoke({"said": []}, {"metadata": {"rollout_id": rollout.id}})
    assert not other.steps
    assert [s.identity.node for s in rollout.steps] == ["node"]
    assert not rollout.finish().faults
    other.finish()


def test_a_call_that_cannot_be_attributed_is_counted_and_said(
    server: FakeVLLM, caplog: pytest.LogCaptureFixture
):
    """C02."""
    chat = ChatART(StaticEndpoint(server.base_url, "lost"))
    other = Rollout()

    def node(state: State) -> State:
        in_thread(chat.invoke, "hi")
        in_thread(chat.invoke, "hi")
        return {"said": []}

    with recording(Rollout()) as rollout:
        run_in_node(node)
    assert not rollout.steps
    assert not other.steps
    assert rollout.finish().faults == other.finish().faults == {"unattributed_calls": 2}
    warned = [r for r in caplog.records if "rollout is not known" in r.message]
    assert len(warned) == 1
    assert "copy_context" in warned[0].message


def test_a_call_that_belongs_to_no_rollout_on_purpose_stays_out(chat: ChatART):
    def judge() -> None:
        set_current_rollout(None)
        chat.invoke("who is better?")

    rollout = Rollout()
    in_thread(judge)
    assert not rollout.steps
    assert not rollout.finish().faults
