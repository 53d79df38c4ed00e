"""A node with a subgraph in it is retried: LangGraph runs the subgraph under a new namespace (``|1|``).

A second call of the subgraph in one execution would look alike; handlers, which hear of the node's runs, tell
them apart.
"""

from typing import TypedDict

from integration.patterns.retry import POLICY, Warehouse
from integration.patterns.table import Call, Pattern, Seq
from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    order: str
    found: str


def build(llm: BaseChatModel):
    warehouse = Warehouse()

    def find(state: State) -> State:
        return {"found": llm.invoke(f"Find: {state['order']}").text}

    inner = _inner(find)

    def book(state: State) -> State:
        found = inner.invoke(state)["found"]
        return {"found": warehouse.book(llm.invoke(f"Check: {found}").text)}

    return _graph(book)


def abuild(llm: BaseChatModel):
    warehouse = Warehouse()

    async def find(state: State) -> State:
        return {"found": (await llm.ainvoke(f"Find: {state['order']}")).text}

    inner = _inner(find)

    async def book(state: State) -> State:
        found = (await inner.ainvoke(state))["found"]
        return {"found": warehouse.book((await llm.ainvoke(f"Check: {found}")).text)}

    return _graph(book)


def _inner(find):
    graph = StateGraph(State)
    graph.add_node("find", find)
    graph.add_edge(START, "find")
    graph.add_edge("find", END)
    return graph.compile()


def _graph(book):
    graph = StateGraph(State)
    graph.add_node("book", book, retry_policy=POLICY)
    graph.add_edge(START, "book")
    graph.add_edge("book", END)
    return graph.compile()


FIND, CHECK = ("user: Find: bolts",), ("user: Check: M6 bolts",)

PATTERN = Pattern(
    build,
    abuild=abuild,
    inputs=({"order": "bolts"},),
    needs_handler=True,
    expected=Seq(
        Call("book:1|find:1", 1, FIND, "M6 bolts", superseded=True),
        Call("book:1", 1, CHECK, "M6 bolts, in stock", superseded=True),
        Call("book:1|1|find:2", 1, FIND, "M6 bolts"),
        Call("book:1", 1, CHECK, "M6 bolts, in stock", attempt=2),
    ),
)
