"""Supervisor: it chooses among agents; each is a subgraph (`create_agent`) and a node of the team."""

from typing import Literal

from integration.patterns.table import Call, Pattern, Seq, tool
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool as make_tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command
from pydantic import BaseModel


class Next(BaseModel):
    """Who works next."""

    agent: Literal["researcher", "writer", "done"]


@make_tool
def search(query: str) -> str:
    """Look something up."""
    return f"{query}: 1889"


def goto(choice: Next) -> Command:
    return Command(goto=END if choice.agent == "done" else choice.agent)


def build(llm: BaseChatModel):
    chooser = llm.with_structured_output(Next)

    def supervisor(state: MessagesState) -> Command[Literal["researcher", "writer", "__end__"]]:
        return goto(chooser.invoke([("system", "Choose."), *state["messages"]]))

    return _team(llm, supervisor)


def abuild(llm: BaseChatModel):
    chooser = llm.with_structured_output(Next)

    async def supervisor(state: MessagesState) -> Command[Literal["researcher", "writer", "__end__"]]:
        return goto(await chooser.ainvoke([("system", "Choose."), *state["messages"]]))

    return _team(llm, supervisor)


def _team(llm: BaseChatModel, supervisor):
    graph = StateGraph(MessagesState)
    graph.add_node("supervisor", supervisor)
    graph.add_node("researcher", create_agent(llm, [search], system_prompt="Research."))
    graph.add_node("writer", create_agent(llm, [], system_prompt="Write."))
    graph.add_edge(START, "supervisor")
    graph.add_edge("researcher", "supervisor")
    graph.add_edge("writer", "supervisor")
    return graph.compile()


ASK = ("user: When was the tower built?",)
LOOKED = (*ASK, 'assistant: search(query="tower")', "tool: tower: 1889")
FOUND = (*LOOKED, "assistant: 1889")
WRITTEN = (*FOUND, "assistant: It was built in 1889.")

PATTERN = Pattern(
    build,
    abuild=abuild,
    inputs=({"messages": [("user", "When was the tower built?")]},),
    expected=Seq(
        Call("supervisor:1", 1, ("system: Choose.", *ASK), '{"agent": "researcher"}'),
        Call("researcher:1|model:1", 1, ("system: Research.", *ASK), (tool("search", query="tower"),)),
        Call("researcher:1|model:2", 3, ("system: Research.", *LOOKED), "1889"),
        Call("supervisor:2", 3, ("system: Choose.", *FOUND), '{"agent": "writer"}'),
        Call("writer:1|model:3", 1, ("system: Write.", *FOUND), "It was built in 1889."),
        Call("supervisor:3", 5, ("system: Choose.", *WRITTEN), '{"agent": "done"}'),
    ),
)
