"""Rollouts that are exported to a fake Langfuse, the connection to it, and the scores that arrived."""

from dataclasses import replace
from typing import Any

from fakes.langfuse_server import PUBLIC_KEY, SECRET_KEY, LangfuseServer
from helpers.trajectories import a_span, a_step, a_trajectory

from art_core.types import StepIdentity
from art_langgraph.langfuse.connection import LangfuseConnection
from art_langgraph.langfuse.ids import trace_id


def connection(server: LangfuseServer, **changes: Any) -> LangfuseConnection:
    settings = {"requests_per_minute": 60_000, "timeout": 60, "attempts": 3, "patience": 20} | changes
    return LangfuseConnection(
        public_key=PUBLIC_KEY, secret_key=SECRET_KEY, base_url=server.base_url, **settings
    )


GRAPH = (
    a_span(0, id="g", kind="chain", name="LangGraph", parent_id=None, node=None, namespace="", tags=()),
    a_span(1, id="n", kind="chain", name="player", parent_id="g", node="player", namespace="player:1"),
    a_span(2, id="l", kind="llm", name="ChatART", parent_id="n", node="player", namespace="player:1"),
    a_span(3, id="t", kind="tool", name="look", parent_id="n", status="error", error="ValueError: no"),
    a_span(4, id="r", kind="retriever", name="books", parent_id="n", status="cancelled"),
)


def with_steps(name: str, *steps: Any, **changes: Any) -> Any:
    return replace(a_trajectory(name, 0, **changes), steps=steps)


def played(name: str = "t-1", **changes: Any) -> Any:
    where = StepIdentity(node="player", namespace="player:1", run_id="l", parent_run_id="n", graph_step=1)
    step = a_step(
        name,
        0,
        identity=where,
        sampling={"temperature": 1.0, "logprobs": True},
        tools=({"type": "function", "function": {"name": "look"}},),
        usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    )
    stray = a_step(name, 1, identity=StepIdentity(node="player", namespace="player:1"), started_at=1001.5)
    lost = a_step(name, 2, identity=StepIdentity(), error="APIError: down", response=None, tokens=None)
    return with_steps(name, step, stray, lost, **({"spans": GRAPH, "metadata": {"seed": 7}} | changes))


def scores(server: LangfuseServer, name: str = "t-1") -> dict[str, dict[str, Any]]:
    return {s["name"]: s for s in server.scores_of(trace_id(name))}
