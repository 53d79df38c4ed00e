"""What the design takes for granted about how LangGraph tells branches, retries and resumes apart.

One that fails here changes the design.
"""

from uuid import UUID

from helpers.stock_agents import thread
from helpers.watched_graphs import Said, State, Watcher, one_node, says
from langgraph.graph import START, StateGraph
from langgraph.runtime import get_runtime
from langgraph.types import Command, RetryPolicy, Send, interrupt


def test_only_the_full_checkpoint_namespace_tells_two_branches_of_one_subgraph_apart() -> None:
    model = says()

    def call(state: State) -> State:
        model.invoke("first")
        model.invoke("second")
        return {"said": ["x"]}

    inner = StateGraph(State, output_schema=Said)
    inner.add_node("inner", call)
    inner.add_edge(START, "inner")
    outer = StateGraph(State)
    outer.add_node("work", inner.compile())
    outer.add_conditional_edges(START, lambda state: [Send("work", {"topic": t}) for t in "ab"], ["work"])
    watcher = Watcher()
    outer.compile().invoke({}, {"callbacks": [watcher]})
    assert watcher.metadata("langgraph_node") == ["inner"] * 4
    namespaces = watcher.metadata("langgraph_checkpoint_ns")
    assert len(set(namespaces)) == 2, "two calls in one node share a namespace, two branches do not"
    for namespace in namespaces:
        work, inner_part = namespace.split("|")
        assert UUID(work.removeprefix("work:"))
        assert UUID(inner_part.removeprefix("inner:"))


def test_a_node_retry_runs_under_the_same_namespace_with_the_next_attempt_number() -> None:
    attempts: list[int] = []
    model = says()

    def flaky(state: State) -> State:
        info = get_runtime().execution_info
        assert info is not None
        attempts.append(info.node_attempt)
        model.invoke("go")
        if len(attempts) < 3:
            raise RuntimeError("not yet")
        return {"said": ["done"]}

    policy = RetryPolicy(initial_interval=0.001, jitter=False, retry_on=RuntimeError)
    watcher = Watcher()
    one_node(flaky, retry_policy=policy).invoke({}, {"callbacks": [watcher], **thread()})
    assert attempts == [1, 2, 3]
    assert len(set(watcher.metadata("langgraph_checkpoint_ns"))) == 1


def test_a_resumed_node_runs_again_under_the_same_namespace_as_attempt_one() -> None:
    attempts: list[int] = []
    model = says()

    def ask(state: State) -> State:
        info = get_runtime().execution_info
        assert info is not None
        attempts.append(info.node_attempt)
        model.invoke("draft")
        return {"said": [interrupt("may I?")]}

    watcher = Watcher()
    graph = one_node(ask)
    assert graph.invoke({}, {"callbacks": [watcher], **thread()})["__interrupt__"][0].value == "may I?"
    graph.invoke(Command(resume="yes"), {"callbacks": [watcher], **thread()})
    assert attempts == [1, 1], "only retries are numbered: resumes have to be counted by namespace"
    assert len(set(watcher.metadata("langgraph_checkpoint_ns"))) == 1
