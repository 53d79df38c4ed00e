"""What tests of learning graphs share: a tiny policy on the embedded engine, an agent, a reward, a judge."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.judges import runs, told
from langgraph.graph import END, START, MessagesState, StateGraph

from art_core import LocalBackend, TrainableModel
from art_core.types import Scenario, Trajectory
from art_langgraph import (
    ChatART,
)

THREAD: Any = {"configurable": {"thread_id": "run"}}


TWO = [Scenario(f"s{i}", {"messages": [("user", f"say {i}")]}) for i in range(2)]


def registered(base: str, root: Path) -> TrainableModel:
    model = TrainableModel(base_model=base, project="p", name="agent", lora_rank=4, learning_rate=1e-2)
    model.register(LocalBackend(root=root, dtype="float32", max_model_len=128, deterministic=True))
    return model


def an_agent(model: TrainableModel, broken: Sequence[str] = ()) -> Any:
    llm = ChatART(model, max_tokens=3)

    async def act(state: MessagesState) -> Any:
        if state["messages"][0].content in broken:
            raise ValueError("no such tool")
        return {"messages": [await llm.ainvoke(state["messages"])]}

    return (
        StateGraph(MessagesState).add_node("act", act).add_edge(START, "act").add_edge("act", END).compile()
    )


def reward(trajectory: Trajectory) -> float:
    tokens = trajectory.steps[0].tokens
    assert tokens is not None
    return float(sum(tokens.completion) % 7)


def verdict(request: dict[str, Any]) -> str:
    """A judge that is as good as random, and says the same of the same."""
    texts = runs(request["messages"])
    return told(
        [(n, int(hashlib.sha256(t.encode()).hexdigest()[:4], 16) % 100 / 100) for n, t in texts.items()]
    )
