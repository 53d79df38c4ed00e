"""Long-running with `RetryPolicy`: a node fails once after its call, and runs again in the same place."""

from typing import TypedDict

from integration.patterns.table import Call, Pattern, Seq
from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.types import RetryPolicy

POLICY = RetryPolicy(initial_interval=0.01, max_attempts=3, retry_on=ConnectionError)


class State(TypedDict, total=False):
    order: str
    booked: str
    told: str


class Warehouse:
    """Refuses the first booking."""

    def __init__(self) -> None:
        self.asked = 0

    def book(self, what: str) -> str:
        self.asked += 1
        if self.asked == 1:
            raise ConnectionError("the warehouse hung up")
        return what


def build(llm: BaseChatModel):
    warehouse = Warehouse()

    def book(state: State) -> State:
        return {"booked": warehouse.book(llm.invoke(f"Find: {state['order']}").text)}

    def tell(state: State) -> State:
        return {"told": llm.invoke(f"Confirm: {state['booked']}").text}

    return _graph(book, tell)


def abuild(llm: BaseChatModel):
    warehouse = Warehouse()

    async def book(state: State) -> State:
        return {"booked": warehouse.book((await llm.ainvoke(f"Find: {state['order']}")).text)}

    async def tell(state: State) -> State:
        return {"told": (await llm.ainvoke(f"Confirm: {state['booked']}")).text}

    return _graph(book, tell)


def _graph(book, tell):
    graph = StateGraph(State)
    graph.add_node("book", book, retry_policy=POLICY)
    graph.add_node("tell", tell)
    graph.add_edge(START, "book")
    graph.add_edge("book", "tell")
    graph.add_edge("tell", END)
    return graph.compile()


FIND = ("user: Find: bolts",)

PATTERN = Pattern(
    build,
    abuild=abuild,
    inputs=({"order": "bolts"},),
    expected=Seq(
        Call("book:1", 1, FIND, "M6 bolts", superseded=True),
        Call("book:1", 1, FIND, "M6 bolts", attempt=2),
        Call("tell:1", 2, ("user: Confirm: M6 bolts",), "They are yours."),
    ),
)
