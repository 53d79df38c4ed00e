"""The handler as a plain tracer: no policy, no gateway, no training."""

import asyncio
import json
from dataclasses import asdict
from operator import add
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, RetryPolicy, Send, interrupt

from art_core.types import Span, Trajectory
from art_langgraph.capturing import capture
from art_langgraph.spans import MAX_ITEMS, MAX_TEXT, jsonable


class State(TypedDict, total=False):
    topic: str
    said: Annotated[list[str], add]


class Library(BaseRetriever):
    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        if query == "lost":
            raise LookupError("no such shelf")
        return [Document(f"about {query}", metadata={"page": 1})]


@tool
def double(number: int) -> int:
    """Double a number."""
    if number < 0:
        raise ValueError("negative")
    return 2 * number


def graph_of(node: Any, **options: Any) -> Any:
    builder = StateGraph(State)
    builder.add_node("work", node, **options)
    builder.add_edge(START, "work")
    builder.add_edge("work", END)
    return builder.compile(checkpointer=InMemorySaver())


THREAD: Any = {"configurable": {"thread_id": "1"}}


def by_name(trajectory: Trajectory, name: str) -> Span:
    (span,) = [s for s in trajectory.spans if s.name == name]
    return span


def test_nodes_tools_retrievers_and_calls_are_spans_with_their_parents() -> None:
    model = GenericFakeChatModel(messages=iter([AIMessage("four")]))

    def node(state: State) -> State:
        Library().invoke("tea")
        double.invoke({"number": 2})
        return {"said": [str(model.invoke("hi").content)]}

    with capture() as rollout:
        graph_of(node).invoke({"topic": "t"}, THREAD)
    trajectory = rollout.snapshot()
    work = by_name(trajectory, "work")
    graph = by_name(trajectory, "LangGraph")
    assert (graph.parent_id, work.parent_id) == (None, graph.id)
    assert (work.kind, work.node, work.inputs, work.outputs) == (
        "chain", "work", {"topic": "t", "said": []}, {"said": ["four"]},
    )  # fmt: skip
    assert work.namespace.startswith("work:")
    found = {s.name: s for s in trajectory.spans if s.parent_id == work.id}
    assert {n: s.kind for n, s in found.items()} == {
        "Library": "retriever", "double": "tool", "GenericFakeChatModel": "llm",
    }  # fmt: skip
    assert (found["double"].inputs, found["double"].outputs) == ({"number": 2}, 4)
    assert found["Library"].inputs == "tea"
    assert found["Library"].outputs == [{"page_content": "about tea", "metadata": {"page": 1}}]
    assert found["GenericFakeChatModel"].id == trajectory.steps[0].identity.run_id
    assert all(s.status == "ok" and s.duration >= 0 for s in trajectory.spans)
    assert [s.started_at for s in trajectory.spans] == sorted(s.started_at for s in trajectory.spans)


def test_errors_are_on_the_spans_that_raised() -> None:
    def node(state: State) -> State:
        with pytest.raises(LookupError):
            Library().invoke("lost")
        double.invoke({"number": -1})
        return {}

    with pytest.raises(ValueError, match="negative"), capture() as rollout:
        graph_of(node).invoke({}, THREAD)
    trajectory = rollout.snapshot()
    errors = {s.name: s.error for s in trajectory.spans if s.status == "error"}
    assert errors == {
        "Library": "LookupError: no such shelf",
        "double": "ValueError: negative",
        "work": "ValueError: negative",
        "LangGraph": "ValueError: negative",
    }
    assert trajectory.failure is not None
    assert (trajectory.failure.message, trajectory.failure.error_type) == ("negative", "builtins.ValueError")


def test_an_interrupt_is_no_error_and_a_resume_is_the_next_attempt() -> None:
    graph = graph_of(lambda state: {"said": [interrupt({"question": "may I?"})]})
    with capture() as rollout:
        graph.invoke({}, THREAD)
        graph.invoke(Command(resume="yes"), THREAD)
    trajectory = rollout.snapshot()
    first, second = [s for s in trajectory.spans if s.name == "work"]
    assert (first.status, second.status) == ("interrupted", "ok")
    assert first.outputs[0]["interrupt"] == {"question": "may I?"}
    assert (first.attempt, second.attempt) == (1, 2)
    assert [s.inputs for s in trajectory.spans if s.name == "LangGraph"] == [{}, {"resume": "yes"}]
    assert not [s for s in trajectory.spans if s.error]


def test_retries_are_attempts_of_one_namespace() -> None:
    tries: list[int] = []

    def flaky(state: State) -> State:
        tries.append(1)
        double.invoke({"number": 1})
        if len(tries) < 2:
            raise RuntimeError("not yet")
        return {}

    policy = RetryPolicy(initial_interval=0.001, jitter=False, retry_on=RuntimeError)
    with capture() as rollout:
        graph_of(flaky, retry_policy=policy).invoke({}, THREAD)
    spans = rollout.snapshot().spans
    assert [(s.status, s.attempt) for s in spans if s.name == "work"] == [("error", 1), ("ok", 2)]
    assert [s.attempt for s in spans if s.name == "double"] == [1, 2]


def test_branches_of_a_subgraph_hang_on_their_own_parents() -> None:
    inner = StateGraph(State)
    inner.add_node("inner", lambda state: {"said": [str(double.invoke({"number": int(state["topic"])}))]})
    inner.add_edge(START, "inner")
    outer = StateGraph(State, output_schema=TypedDict("Out", {"said": Annotated[list[str], add]}))
    outer.add_node("work", lambda state: {"said": inner.compile().invoke(state)["said"]})
    outer.add_conditional_edges(START, lambda state: [Send("work", {"topic": t}) for t in "123"], ["work"])
    with capture() as rollout:
        outer.compile().invoke({})
    spans = {s.id: s for s in rollout.snapshot().spans}
    for number in (1, 2, 3):
        (span,) = [s for s in spans.values() if s.name == "double" and s.inputs == {"number": number}]
        path = []
        parent: Span | None = span
        while parent is not None:
            path.append(parent.name)
            parent = spans[parent.parent_id] if parent.parent_id else None
        assert path == ["double", "inner", "LangGraph", "work", "LangGraph"]


async def test_concurrent_rollouts_keep_their_own_spans() -> None:
    async def node(state: State) -> State:
        await asyncio.sleep(0.001)
        return {"said": [str(await double.ainvoke({"number": int(state["topic"])}))]}

    graph = graph_of(node)

    async def one(number: int) -> Trajectory:
        async with capture() as rollout:
            await graph.ainvoke({"topic": str(number)}, {"configurable": {"thread_id": str(number)}})
        return rollout.snapshot()

    for number, trajectory in enumerate(await asyncio.gather(*(one(n) for n in range(20)))):
        assert by_name(trajectory, "double").inputs == {"number": number}
        assert len(trajectory.spans) == 3


def test_spans_can_be_left_out() -> None:
    with capture(spans=False) as rollout:
        double.invoke({"number": 1})
    assert rollout.snapshot().spans == ()


def test_a_span_is_json_whatever_went_through_the_graph() -> None:
    class Odd:
        def __repr__(self) -> str:
            return "<odd>"

    loop: list[Any] = []
    loop.append(loop)
    values = {"odd": Odd(), "set": {1}, "key": {(1, 2): "tuple"}, "loop": loop, "long": "x" * (MAX_TEXT + 1)}
    shown = jsonable({**values, "many": list(range(MAX_ITEMS + 1)), "message": AIMessage("hi")})
    assert json.loads(json.dumps(shown)) == shown
    assert (shown["odd"], shown["set"], shown["key"]) == ("<odd>", [1], {"(1, 2)": "tuple"})
    assert shown["long"].endswith(f"({MAX_TEXT + 1} characters)")
    assert shown["many"][-1] == f"... ({MAX_ITEMS + 1} items)"
    assert shown["message"] == {"role": "assistant", "content": "hi"}


def test_a_node_that_removes_messages_and_one_whose_state_cannot_be_shown_keep_their_spans() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no words")

    def trim(state: MessagesState) -> dict[str, Any]:
        return {"messages": [RemoveMessage(id="first"), AIMessage("short", id="second")]}

    graph = StateGraph(MessagesState)
    graph.add_node("trim", trim)
    graph.add_edge(START, "trim")
    with capture() as rollout:
        graph.compile().invoke({"messages": [HumanMessage("long", id="first")]})
        RunnableLambda(lambda broken: broken).with_config(run_name="odd").invoke(Broken())
    trajectory = rollout.snapshot()
    assert trajectory.faults == {}
    trim_span, odd = by_name(trajectory, "trim"), by_name(trajectory, "odd")
    assert (trim_span.status, odd.status) == ("ok", "ok")
    assert trim_span.outputs["messages"][0] == {"role": "remove", "id": "first"}
    assert odd.outputs == "(Broken that cannot be shown: RuntimeError: no words)"


def test_every_span_of_a_trajectory_is_json() -> None:
    with capture() as rollout:
        graph_of(lambda state: {"said": ["x"]}).invoke({"topic": "t"}, THREAD)
    assert json.dumps([asdict(s) for s in rollout.snapshot().spans])
