"""Human approval: a node drafts, then waits with `interrupt`; the resumed run executes that node again.

The first draft was sampled, and nobody built on it: it is kept, marked as superseded.
"""

from typing import TypedDict

from integration.patterns.table import Call, Pattern, Seq
from langchain_core.language_models import BaseChatModel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt


class State(TypedDict, total=False):
    request: str
    draft: str
    sent: str


def build(llm: BaseChatModel):
    def write(state: State) -> State:
        draft = llm.invoke(f"Draft: {state['request']}").text
        return {"draft": f"{draft} ({interrupt({'approve': draft})})"}

    def send(state: State) -> State:
        return {"sent": llm.invoke(f"Sign: {state['draft']}").text}

    return _graph(write, send)


def abuild(llm: BaseChatModel):
    async def write(state: State) -> State:
        draft = (await llm.ainvoke(f"Draft: {state['request']}")).text
        return {"draft": f"{draft} ({interrupt({'approve': draft})})"}

    async def send(state: State) -> State:
        return {"sent": (await llm.ainvoke(f"Sign: {state['draft']}")).text}

    return _graph(write, send)


def _graph(write, send):
    graph = StateGraph(State)
    graph.add_node("write", write)
    graph.add_node("send", send)
    graph.add_edge(START, "write")
    graph.add_edge("write", "send")
    graph.add_edge("send", END)
    return graph.compile(checkpointer=InMemorySaver())


DRAFT = ("user: Draft: refund",)

PATTERN = Pattern(
    build,
    abuild=abuild,
    inputs=({"request": "refund"}, Command(resume="approved")),
    expected=Seq(
        Call("write:1", 1, DRAFT, "We refund you.", superseded=True),
        Call("write:1", 1, DRAFT, "We refund you.", attempt=2),
        Call("send:1", 2, ("user: Sign: We refund you. (approved)",), "Yours, the shop"),
    ),
)
