"""Map and reduce: a hundred branches of one node, alike but for their item, and one call over all of them."""

import operator
from typing import Annotated, TypedDict

from integration.patterns.table import Call, Par, Pattern, Seq
from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

ITEMS = 100


class State(TypedDict, total=False):
    items: list[int]
    squares: Annotated[list[int], operator.add]
    total: str


class Item(TypedDict):
    item: int


def spread(state: State) -> list[Send]:
    return [Send("square", {"item": item}) for item in state["items"]]


def build(llm: BaseChatModel):
    def square(work: Item) -> State:
        return {"squares": [int(llm.invoke(f"Square of {work['item']}").text)]}

    def add(state: State) -> State:
        return {"total": llm.invoke(f"Check the sum {sum(state['squares'])}").text}

    return _graph(square, add)


def abuild(llm: BaseChatModel):
    async def square(work: Item) -> State:
        return {"squares": [int((await llm.ainvoke(f"Square of {work['item']}")).text)]}

    async def add(state: State) -> State:
        return {"total": (await llm.ainvoke(f"Check the sum {sum(state['squares'])}")).text}

    return _graph(square, add)


def _graph(square, add):
    graph = StateGraph(State)
    graph.add_node("square", square)
    graph.add_node("add", add)
    graph.add_conditional_edges(START, spread, ["square"])
    graph.add_edge("square", "add")
    graph.add_edge("add", END)
    return graph.compile()


PATTERN = Pattern(
    build,
    abuild=abuild,
    inputs=({"items": list(range(ITEMS))},),
    expected=Seq(
        Par(*(Call(f"square:{i}", 1, (f"user: Square of {i}",), str(i * i)) for i in range(ITEMS))),
        Call("add:1", 2, ("user: Check the sum 328350",), "right"),
    ),
)
