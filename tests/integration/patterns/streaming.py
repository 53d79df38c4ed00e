"""Streaming: a node and a subgraph's node, watched while they run, in every way that LangGraph offers."""

from integration.patterns.table import Call, Pattern, Seq
from langchain_core.language_models import BaseChatModel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer
from langgraph.graph import END, START, MessagesState, StateGraph


def build(llm: BaseChatModel):
    def think(state: MessagesState) -> MessagesState:
        get_stream_writer()({"thinking": True})
        return {"messages": [llm.invoke([("system", "Think."), *state["messages"]])]}

    def answer(state: MessagesState) -> MessagesState:
        return {"messages": [llm.invoke([("system", "Answer."), *state["messages"]])]}

    return _graph(think, answer)


def abuild(llm: BaseChatModel):
    async def think(state: MessagesState) -> MessagesState:
        get_stream_writer()({"thinking": True})
        return {"messages": [await llm.ainvoke([("system", "Think."), *state["messages"]])]}

    async def answer(state: MessagesState) -> MessagesState:
        return {"messages": [await llm.ainvoke([("system", "Answer."), *state["messages"]])]}

    return _graph(think, answer)


def _graph(think, answer):
    inner = StateGraph(MessagesState)
    inner.add_node("think", think)
    inner.add_edge(START, "think")
    graph = StateGraph(MessagesState)
    graph.add_node("reason", inner.compile())
    graph.add_node("answer", answer)
    graph.add_edge(START, "reason")
    graph.add_edge("reason", "answer")
    graph.add_edge("answer", END)
    return graph.compile(checkpointer=InMemorySaver())


ASK = ("user: Why is the sky blue?",)

PATTERN = Pattern(
    build,
    abuild=abuild,
    inputs=({"messages": [("user", "Why is the sky blue?")]},),
    expected=Seq(
        Call("reason:1|think:1", 1, ("system: Think.", *ASK), "Scattering."),
        Call("answer:1", 2, ("system: Answer.", *ASK, "assistant: Scattering."), "Air scatters blue."),
    ),
)
