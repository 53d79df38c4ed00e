"""Prompt chaining: each call works on the answer of the one before; a gate may end the chain early."""

from typing import Literal, TypedDict

from integration.patterns.table import Call, Pattern, Seq
from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    topic: str
    draft: str
    final: str


def punchy(state: State) -> Literal["polish", "__end__"]:
    return "polish" if "?" in state["draft"] else END


def build(llm: BaseChatModel):
    def draft(state: State) -> State:
        return {"draft": llm.invoke(f"A joke about {state['topic']}").text}

    def polish(state: State) -> State:
        better = llm.invoke(f"Make it funnier: {state['draft']}").text
        return {"final": llm.invoke(f"Add a twist: {better}").text}

    return _graph(draft, polish)


def abuild(llm: BaseChatModel):
    async def draft(state: State) -> State:
        return {"draft": (await llm.ainvoke(f"A joke about {state['topic']}")).text}

    async def polish(state: State) -> State:
        better = (await llm.ainvoke(f"Make it funnier: {state['draft']}")).text
        return {"final": (await llm.ainvoke(f"Add a twist: {better}")).text}

    return _graph(draft, polish)


def _graph(draft, polish):
    graph = StateGraph(State)
    graph.add_node("draft", draft)
    graph.add_node("polish", polish)
    graph.add_edge(START, "draft")
    graph.add_conditional_edges("draft", punchy)
    graph.add_edge("polish", END)
    return graph.compile()


PATTERN = Pattern(
    build,
    abuild=abuild,
    inputs=({"topic": "tea"},),
    expected=Seq(
        Call("draft:1", 1, ("user: A joke about tea",), "Why tea?"),
        Call("polish:1", 2, ("user: Make it funnier: Why tea?",), "Why green tea?"),
        Call("polish:1", 2, ("user: Add a twist: Why green tea?",), "It was coffee.", call_index=1),
    ),
)
