"""C11: what a retry or a resume replaced is marked, through subgraphs too; what it did not replace is not.

Each test runs a real graph whose nodes call the policy, and names the calls that count in the end.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import add
from typing import Annotated, Any, TypedDict

import pytest
from fakes.vllm_server import FakeVLLM
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.types import Command, RetryPolicy, Send, interrupt

from art_core.capture import superseded
from art_core.inference.endpoint import StaticEndpoint
from art_core.selection import SUPERSEDED, choose
from art_core.types import Trajectory
from art_langgraph import ChatART, TrajectoryCallbackHandler, capture

RETRY = RetryPolicy(initial_interval=0.001, jitter=False, max_attempts=4, retry_on=RuntimeError)
THREAD: RunnableConfig = {"configurable": {"thread_id": "1"}}


class State(TypedDict, total=False):
    topic: str
    said: Annotated[list[str], add]


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM(lambda request: "yes") as fake:
        yield fake


class Asks:
    """Nodes that ask the policy, numbered by how often each has asked, and fail as often as told."""

    def __init__(self, server: FakeVLLM) -> None:
        self.chat = ChatART(StaticEndpoint(server.base_url, "m@1"), max_retries=0)
        self.asked: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def ask(self, name: str) -> None:
        self.asked[name] += 1
        self.chat.invoke(f"{name} {self.asked[name]}")

    async def aask(self, name: str) -> None:
        self.asked[name] += 1
        await self.chat.ainvoke(f"{name} {self.asked[name]}")

    def fail(self, name: str, times: int) -> None:
        if self.failed[name] < times:
            self.failed[name] += 1
            raise RuntimeError(f"{name} is not ready")

    def node(self, name: str, *, fails: int = 0, waits: bool = False) -> Callable[[State], State]:
        def node(state: State) -> State:
            self.ask(name + state.get("topic", ""))
            self.fail(name, fails)
            if waits:
                interrupt("may I?")
                self.ask(f"{name} after")
            return {"said": [name]}

        return node


@pytest.fixture
def asks(server: FakeVLLM) -> Asks:
    return Asks(server)


def chain(*nodes: tuple[str, Any], retried: str = "", saver: Any = None) -> Any:
    builder = StateGraph(State)
    for name, node in nodes:
        builder.add_node(name, node, retry_policy=RETRY if name == retried else None)
    builder.add_edge(START, nodes[0][0])
    for (before, _), (after, _) in pairwise(nodes):
        builder.add_edge(before, after)
    return builder.compile(checkpointer=saver)


def outcome(trajectory: Trajectory) -> tuple[set[str], set[str]]:
    """What was asked: what counts, and what was superseded."""
    gone = superseded(trajectory.steps)
    counts = {s.messages[-1]["content"] for s in trajectory.steps if s.id not in gone}
    left = {s.messages[-1]["content"] for s in trajectory.steps if s.id in gone}
    assert len(counts) + len(left) == len(trajectory.steps)
    assert choose(trajectory).left_out.get(SUPERSEDED, 0) == len(left), "selection and capture agree"
    return counts, left


def run(graph: Any, *inputs: Any, spans: bool = False) -> Trajectory:
    with capture(spans=spans) as rollout:
        for given in inputs:
            graph.invoke(given, THREAD)
    return rollout.snapshot()


@pytest.mark.parametrize("spans", [False, True])
def test_a_retried_node_replaces_what_its_subgraph_said(asks: Asks, spans: bool) -> None:
    inner = chain(("leaf", asks.node("leaf")))

    def work(state: State) -> State:
        asks.ask("work")
        inner.invoke(state)
        asks.fail("work", 2)
        return {"said": ["work"]}

    trajectory = run(chain(("work", work), retried="work"), {}, spans=spans)
    assert outcome(trajectory) == ({"work 3", "leaf 3"}, {"work 1", "work 2", "leaf 1", "leaf 2"})


def test_a_subgraph_called_twice_in_one_execution_counts_twice(asks: Asks) -> None:
    inner = chain(("leaf", asks.node("leaf")))

    def work(state: State) -> State:
        inner.invoke(state)
        inner.invoke(state)
        asks.fail("work", 1)
        return {"said": ["work"]}

    trajectory = run(chain(("work", work), retried="work"), {})
    assert outcome(trajectory) == ({"leaf 3", "leaf 4"}, {"leaf 1", "leaf 2"})


def test_a_retried_subgraph_that_is_itself_the_node_is_replaced_whole(asks: Asks) -> None:
    inner = chain(("plan", asks.node("plan")), ("act", asks.node("act", fails=2)))
    trajectory = run(chain(("work", inner), ("end", asks.node("end")), retried="work"), {})
    assert outcome(trajectory) == ({"plan 3", "act 3", "end 1"}, {"plan 1", "plan 2", "act 1", "act 2"})


def test_a_retry_inside_a_subgraph_replaces_that_node_alone(asks: Asks) -> None:
    inner = chain(("plan", asks.node("plan")), ("act", asks.node("act", fails=1)), retried="act")
    trajectory = run(chain(("work", inner), retried="work"), {})
    assert outcome(trajectory) == ({"plan 1", "act 2"}, {"act 1"})


def test_a_retry_replaces_what_was_said_two_levels_below(asks: Asks) -> None:
    deep = chain(("leaf", asks.node("leaf")))

    def middle(state: State) -> State:
        asks.ask("middle")
        deep.invoke(state)
        return {}

    inner = chain(("middle", middle), ("deep", deep))

    def work(state: State) -> State:
        inner.invoke(state)
        asks.fail("work", 1)
        return {"said": ["work"]}

    trajectory = run(chain(("work", work), retried="work"), {})
    assert outcome(trajectory) == ({"middle 2", "leaf 3", "leaf 4"}, {"middle 1", "leaf 1", "leaf 2"})


def test_a_retried_branch_leaves_its_siblings_alone(asks: Asks) -> None:
    inner = chain(("leaf", asks.node("leaf")))

    def work(state: State) -> State:
        inner.invoke(state)
        if state.get("topic") == " a":
            asks.fail("work", 1)
        return {"said": ["work"]}

    builder = StateGraph(State)
    builder.add_node("work", work, retry_policy=RETRY)
    builder.add_conditional_edges(
        START, lambda _: [Send("work", {"topic": t}) for t in (" a", " b")], ["work"]
    )
    assert outcome(run(builder.compile(), {})) == ({"leaf a 2", "leaf b 1"}, {"leaf a 1"})


async def test_an_async_node_that_is_retried_replaces_what_its_subgraph_said(asks: Asks) -> None:
    async def leaf(state: State) -> State:
        await asks.aask("leaf")
        return {}

    inner = chain(("leaf", leaf))

    async def work(state: State) -> State:
        await inner.ainvoke(state)
        asks.fail("work", 1)
        return {"said": ["work"]}

    async with capture() as rollout:
        await chain(("work", work), retried="work").ainvoke({})
    assert outcome(rollout.snapshot()) == ({"leaf 2"}, {"leaf 1"})


@pytest.mark.parametrize("called", [False, True])
def test_a_resume_replaces_the_node_that_waited_and_not_what_its_subgraph_had_done(
    asks: Asks, called: bool
) -> None:
    inner = chain(("plan", asks.node("plan")), ("act", asks.node("act", waits=True)))

    def work(state: State) -> State:
        asks.ask("work")
        inner.invoke(state)
        return {}

    graph = chain(("work", work if called else inner), saver=InMemorySaver())
    counts, left = outcome(run(graph, {}, Command(resume="yes")))
    assert counts == {"plan 1", "act 2", "act after 1"} | ({"work 2"} if called else set())
    assert left == {"act 1"} | ({"work 1"} if called else set())


def test_a_resumed_node_keeps_what_its_finished_subgraph_said(asks: Asks) -> None:
    inner = chain(("leaf", asks.node("leaf")))

    def work(state: State) -> State:
        inner.invoke(state)
        asks.ask("work")
        interrupt("may I?")
        return {}

    graph = chain(("work", work), saver=InMemorySaver())
    assert outcome(run(graph, {}, Command(resume="yes"))) == ({"leaf 1", "work 2"}, {"work 1"})


def test_a_graph_that_failed_and_is_run_on_keeps_what_its_subgraph_had_done(asks: Asks) -> None:
    inner = chain(("plan", asks.node("plan")), ("act", asks.node("act", fails=1)))
    graph = chain(("work", inner), saver=InMemorySaver())
    with capture() as rollout:
        with pytest.raises(RuntimeError):
            graph.invoke({}, THREAD)
        graph.invoke(None, THREAD)
    assert asks.asked["plan"] == 1, "LangGraph goes on from the subgraph's checkpoint"
    assert outcome(rollout.snapshot()) == ({"plan 1", "act 2"}, {"act 1"})


def test_a_loop_supersedes_nothing(asks: Asks) -> None:
    inner = chain(("leaf", asks.node("leaf")))
    builder = StateGraph(State)
    builder.add_node("work", inner)
    builder.add_edge(START, "work")
    builder.add_conditional_edges("work", lambda _: "work" if asks.asked["leaf"] < 3 else "__end__")
    assert outcome(run(builder.compile(), {})) == ({"leaf 1", "leaf 2", "leaf 3"}, set())


def test_a_retried_entrypoint_replaces_the_tasks_that_ran_again(asks: Asks) -> None:
    @task
    def look(what: str) -> str:
        asks.ask(what)
        return what

    @entrypoint(retry_policy=RETRY, checkpointer=InMemorySaver())
    def flow(given: dict[str, Any]) -> str:
        look("first").result()
        asks.fail("flow", 1)
        return look("second").result()

    assert outcome(run(flow, {})) == ({"first 2", "second 1"}, {"first 1"})


def test_a_retried_task_replaces_what_its_subgraph_said(asks: Asks) -> None:
    inner = chain(("leaf", asks.node("leaf"))).with_config(run_name="part")

    @task(retry_policy=RETRY)
    def part() -> None:
        inner.invoke({})
        inner.invoke({})
        asks.fail("part", 1)

    @entrypoint()
    def flow(given: dict[str, Any]) -> None:
        part().result()
        part().result()

    counts = {f"leaf {i}" for i in (3, 4, 5, 6)}
    assert outcome(run(flow, {})) == (counts, {"leaf 1", "leaf 2"})


def test_two_handlers_of_one_rollout_do_not_make_a_retry(asks: Asks) -> None:
    inner = chain(("leaf", asks.node("leaf")))
    graph = chain(("work", asks.node("work")), ("inner", inner))
    with capture() as rollout:
        graph.invoke({}, {"callbacks": [TrajectoryCallbackHandler(rollout)]})
    assert {s.identity.retries for s in rollout.steps} == {()}
    assert outcome(rollout.snapshot()) == ({"work 1", "leaf 1"}, set())
