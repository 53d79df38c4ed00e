"""The agent that the capture benchmark runs: one node that calls the model several times, once a superstep.

Every prompt names its rollout and its call, and the server repeats them, so a step that lands in another
rollout is seen.
"""

import os
from typing import Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph

from art_core.inference.endpoint import StaticEndpoint
from art_langgraph import ChatART

MODEL = "policy@1"

SERVER_VARIABLE = "CAPTURE_BENCHMARK_SERVER"
"""Environment variable with the server's URL, for `policy_graph` in worker processes."""

CALLS = 5
"""Calls of one rollout, unless its input says otherwise."""

SETTING = "You are the agent of a benchmark. Answer with what you were asked, in one line. " * 2
"""A system prompt of a usual length (166 tokens of the fake server)."""


class State(TypedDict, total=False):
    """``calls`` may be left out; ``last`` is the newest answer."""

    rollout: int
    calls: int
    done: int
    last: str


def question(rollout: int, call: int) -> str:
    return f"rollout {rollout:06d}, call {call:03d}: what comes next?"


def answer(asked: str) -> str:
    """What the server says: 49 tokens that name rollout and call."""
    return f"{asked[:24]}: a step to the left."


def more(state: State) -> str:
    return "ask" if state["done"] < state.get("calls", CALLS) else END


def build(llm: BaseChatModel) -> Any:
    async def ask(state: State) -> State:
        done = state.get("done", 0)
        reply = await llm.ainvoke([("system", SETTING), ("user", question(state["rollout"], done))])
        return {"done": done + 1, "last": reply.text}

    graph = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", more, ["ask", END])
    return graph.compile()


def policy_graph() -> Any:
    """The agent with a ChatART, for processes that are given an import path."""
    return build(ChatART(StaticEndpoint(os.environ[SERVER_VARIABLE], MODEL)))
