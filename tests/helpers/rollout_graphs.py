"""Graphs that worker processes are given by import path, and reward functions for them."""

from dataclasses import dataclass
from typing import Any, TypedDict

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime

from art_core.inference.endpoint import PolicyEndpoint
from art_core.types import Scenario, Trajectory
from art_langgraph import ChatART


class State(TypedDict, total=False):
    topic: str
    said: list[str]


def chat_graph(model: PolicyEndpoint, *, calls: int = 2) -> Any:
    """Two calls of the policy, one after the other, with a checkpointer."""
    llm = ChatART(model, max_retries=0)

    async def ask(state: State) -> State:
        said = state.get("said", [])
        reply = await llm.ainvoke(f"{state['topic']}, part {len(said)}")
        return {"said": [*said, reply.text]}

    graph = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", lambda s: "ask" if len(s["said"]) < calls else END, ["ask", END])
    return graph.compile(checkpointer=InMemorySaver())


@dataclass
class Reader:
    """The context of `reading_graph`."""

    name: str


def reader_of(scenario: Scenario) -> Reader:
    return Reader(scenario.id)


def reading_graph(model: PolicyEndpoint) -> Any:
    """One call of the policy, for the reader in the context."""
    llm = ChatART(model, max_retries=0)

    async def ask(state: State, runtime: Runtime[Reader]) -> State:
        return {"said": [(await llm.ainvoke(f"for {runtime.context.name}")).text]}

    graph = StateGraph(State, context_schema=Reader)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    return graph.compile()


def length(trajectory: Trajectory, output: State) -> float:
    return float(len(output["said"]))


def broken_factory() -> Any:
    raise ValueError("the prompt file is missing")


async def agent(scenario: Scenario) -> str:
    return scenario.id


not_a_graph = 42
