"""Routing: a structured answer chooses the node that answers."""

from typing import Literal, TypedDict

from integration.patterns.table import Call, Pattern, Seq
from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel


class Route(BaseModel):
    """Where the question goes."""

    kind: Literal["sums", "words"]


class State(TypedDict, total=False):
    question: str
    kind: str
    answer: str


def build(llm: BaseChatModel):
    router = llm.with_structured_output(Route)

    def route(state: State) -> State:
        return {"kind": router.invoke(f"Route: {state['question']}").kind}

    def sums(state: State) -> State:
        return {"answer": llm.invoke([("system", "You calculate."), ("user", state["question"])]).text}

    def words(state: State) -> State:
        return {"answer": llm.invoke([("system", "You write."), ("user", state["question"])]).text}

    return _graph(route, sums, words)


def abuild(llm: BaseChatModel):
    router = llm.with_structured_output(Route)

    async def route(state: State) -> State:
        return {"kind": (await router.ainvoke(f"Route: {state['question']}")).kind}

    async def sums(state: State) -> State:
        reply = await llm.ainvoke([("system", "You calculate."), ("user", state["question"])])
        return {"answer": reply.text}

    async def words(state: State) -> State:
        reply = await llm.ainvoke([("system", "You write."), ("user", state["question"])])
        return {"answer": reply.text}

    return _graph(route, sums, words)


def _graph(route, sums, words):
    graph = StateGraph(State)
    graph.add_node("route", route)
    graph.add_node("sums", sums)
    graph.add_node("words", words)
    graph.add_edge(START, "route")
    graph.add_conditional_edges("route", lambda state: state["kind"], ["sums", "words"])
    graph.add_edge("sums", END)
    graph.add_edge("words", END)
    return graph.compile()


PATTERN = Pattern(
    build,
    abuild=abuild,
    inputs=({"question": "6 * 7?"},),
    expected=Seq(
        Call("route:1", 1, ("user: Route: 6 * 7?",), '{"kind": "sums"}'),
        Call("sums:1", 2, ("system: You calculate.", "user: 6 * 7?"), "42"),
    ),
)
