"""``model.chat``, OpenAI's own client, called in the nodes of a graph."""

from collections.abc import Iterator
from operator import add
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from helpers.tiny import tiny_model
from langgraph.graph import START, StateGraph
from langgraph.types import RetryPolicy

from art_core import LocalBackend, TrainableModel
from art_core.capture import superseded
from art_core.types import Scenario
from art_langgraph import ChatART, agather


class State(TypedDict, total=False):
    said: Annotated[list[Any], add]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[TrainableModel]:
    base_model = str(tiny_model(tmp_path / "model"))
    with TrainableModel(base_model=base_model, project="p", name="agent", lora_rank=4) as model:
        model.register(LocalBackend(root=tmp_path / "art", dtype="float32", max_model_len=256))
        yield model


async def test_calls_without_langchain_are_placed_in_their_nodes_and_superseded_by_retries(
    model: TrainableModel,
) -> None:
    chat = ChatART(model, max_tokens=2)
    failed: set[str] = set()

    def asked(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 2}

    def plan(state: State) -> State:
        model.chat.completions.create(**asked("plan"))
        chat.invoke("plan too")
        return {}

    async def act(state: State) -> State:
        await model.chat.completions.acreate(**asked("act"))
        async for _ in await model.chat.completions.acreate(**asked("act again"), stream=True):
            pass
        if (this := state["said"][0]) not in failed:
            failed.add(this)
            raise ConnectionError("once")
        return {}

    graph = StateGraph(State).add_node("plan", plan)
    graph.add_node("act", act, retry_policy=RetryPolicy(initial_interval=0.01))
    graph.add_edge(START, "plan").add_edge("plan", "act")
    scenarios = [Scenario(name, {"said": [name]}) for name in ("a", "b")]
    groups = await agather(graph.compile(), scenarios, group_size=1, model=model, progress=False)
    for (trajectory,) in groups:
        placed = [(s.identity.node, s.identity.attempt, s.identity.call_index) for s in trajectory.steps]
        assert placed == [
            ("plan", 1, 0), ("plan", 1, 1), ("act", 1, 0), ("act", 1, 1), ("act", 2, 0), ("act", 2, 1),
        ]  # fmt: skip
        gone = superseded(trajectory.steps)
        assert [s.id in gone for s in trajectory.steps] == [False, False, True, True, False, False]
