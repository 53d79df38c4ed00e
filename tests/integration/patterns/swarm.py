"""Swarm: agents hand over to each other; a tool inside one agent's subgraph sends the parent elsewhere."""

from typing import Annotated

from integration.patterns.table import Call, Pattern, Seq, tool
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import ToolMessage
from langchain_core.tools import InjectedToolCallId
from langchain_core.tools import tool as make_tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState
from langgraph.types import Command


def handoff(agent: str):
    @make_tool(f"to_{agent}")
    def transfer(
        state: Annotated[MessagesState, InjectedState],
        tool_call_id: Annotated[str, InjectedToolCallId],
    ) -> Command:
        """Hand the conversation over."""
        done = ToolMessage(f"now {agent}", tool_call_id=tool_call_id)
        return Command(goto=agent, graph=Command.PARENT, update={"messages": [*state["messages"], done]})

    return transfer


def build(llm: BaseChatModel):
    graph = StateGraph(MessagesState)
    graph.add_node("sales", create_agent(llm, [handoff("support")], system_prompt="Sell."))
    graph.add_node("support", create_agent(llm, [handoff("sales")], system_prompt="Help."))
    graph.add_edge(START, "sales")
    return graph.compile()


ASK = ("user: It broke.",)
MOVED = (*ASK, "assistant: to_support()", "tool: now support")

PATTERN = Pattern(
    build,
    inputs=({"messages": [("user", "It broke.")]},),
    expected=Seq(
        Call("sales:1|model:1", 1, ("system: Sell.", *ASK), (tool("to_support"),)),
        Call("support:1|model:2", 1, ("system: Help.", *MOVED), "Switch it off and on."),
    ),
)
