"""Five hundred rollouts against a server that fails one call in ten: nothing half-kept, nothing made up."""

from collections import Counter
from pathlib import Path
from typing import Any, TypedDict

import pytest
from fakes.vllm_server import FakeVLLM, completion_ids, prompt_ids
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from pydantic import SecretStr

from art_core.inference.endpoint import StaticEndpoint
from art_core.inference.gateway import Gateway
from art_core.recording import Sink
from art_core.store import Store
from art_core.types import Scenario, Step, Trajectory
from art_langgraph.chat_model import ChatART
from art_langgraph.rollouts import agather

MODEL = "policy@3"
SCENARIOS, GROUP, CALLS = 50, 10, 3
TIMEOUT = 8.0
GRACE = 4.0
"""Seconds that a loaded machine may need to end a rollout after its time is up."""


class State(TypedDict, total=False):
    topic: str
    stream: bool
    said: list[str]


def build(llm: BaseChatModel) -> Any:
    """Three calls, one after the other; half of the rollouts stream them."""

    async def ask(state: State) -> State:
        said = state.get("said", [])
        prompt = f"{state['topic']}, part {len(said)}"
        if state["stream"]:
            text = "".join([chunk.text async for chunk in llm.astream(prompt)])
        else:
            text = (await llm.ainvoke(prompt)).text
        return {"said": [*said, text]}

    graph = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    graph.add_conditional_edges(
        "ask", lambda state: "ask" if len(state["said"]) < CALLS else END, ["ask", END]
    )
    return graph.compile()


def answer(request: dict[str, Any]) -> str:
    return f"A few words on {request['messages'][-1]['content']}."


def reward(trajectory: Trajectory, output: State) -> float:
    return float(len(output["said"]))


def problems_of_step(step: Step) -> list[str]:
    """What is not whole about a step: it has all that the server gave, or an error and nothing else."""
    if step.error is not None:
        wrong = [name for name in ("response", "tokens") if getattr(step, name) is not None]
        return [f"{step.id} failed and has {wrong}"] if wrong or step.trainable else []
    request = {"messages": [dict(m) for m in step.messages]}
    said = answer(request)
    found = []
    if not step.trainable or step.tokens is None:
        return [f"{step.id} answered and is not trainable: {step.untrainable}"]
    if step.message() != said:
        found.append(f"{step.id} says {step.message()!r}, the server said {said!r}")
    if step.tokens.completion != completion_ids(said) or step.tokens.prompt != prompt_ids(request):
        found.append(f"{step.id} has other ids than the server gave")
    return found


def problems_of(trajectory: Trajectory) -> list[str]:
    """What is wrong about a trajectory, whether it came to its end or not."""
    name = f"{trajectory.id} ({trajectory.failure})"
    found = [f"{name}: {p}" for step in trajectory.steps for p in problems_of_step(step)]
    errors = [step.error for step in trajectory.steps if step.error is not None]
    if trajectory.duration is None or trajectory.duration > TIMEOUT + GRACE:
        found.append(f"{name} took {trajectory.duration} s")
    if not trajectory.failed:
        if trajectory.reward != CALLS or errors or len(trajectory.steps) != CALLS:
            found.append(f"{name} finished with {trajectory.reward}, {len(trajectory.steps)} steps, {errors}")
        return found
    if trajectory.reward is not None:
        found.append(f"{name} failed and has reward {trajectory.reward}")
    if trajectory.failure is None or not trajectory.failure.message:
        found.append(f"{name} does not say why it failed")
    elif trajectory.failure.cause == "exception" and not trajectory.failure.error_type:
        found.append(f"{name} does not say what was raised")
    if len(errors) != 1 or trajectory.steps[-1].error is None:
        found.append(f"{name} failed, and its steps say {errors}")
    return found


@pytest.fixture
def store(tmp_path: Path):
    with Store.open("faults", tmp_path) as store:
        yield store


async def faulty_run(graph: Any, server: FakeVLLM, sink: Sink, scenarios: int) -> list[Trajectory]:
    """Rollouts of a graph while one call in ten fails."""
    server.fail(0.1, seed=11)
    gathered = await agather(
        graph,
        [Scenario(f"topic-{i}", {"topic": f"topic {i}", "stream": i % 2 == 0}) for i in range(scenarios)],
        group_size=GROUP,
        reward=reward,
        timeout=TIMEOUT,
        concurrency=20,
        min_group_size=0,
        sink=sink,
        progress=False,
    )
    return [t for group in gathered for t in group]


def check(trajectories: list[Trajectory], server: FakeVLLM, store: Store, *, resent: int = 0) -> None:
    assert [p for t in trajectories for p in problems_of(t)] == []
    failed = [t for t in trajectories if t.failure is not None]
    assert len(failed) == server.faults.total() - resent
    assert Counter(t.failure.cause for t in failed if t.failure)["timeout"] == server.faults["stall"]
    assert {t.id: t for t in store.trajectories()} == {t.id: t for t in trajectories}


async def test_a_tenth_of_all_calls_fails_and_every_rollout_says_the_truth(store: Store) -> None:
    """C10, C32, C33, and the fault run."""
    with FakeVLLM(answer) as server:
        llm = ChatART(StaticEndpoint(server.base_url, MODEL, sink=store.sink()), max_retries=0)
        trajectories = await faulty_run(build(llm), server, store.sink(), SCENARIOS)
        assert len(trajectories) == SCENARIOS * GROUP
        assert set(server.faults) == {"drop", "stall", "429", "500", "garbage", "cut_stream"}
        check(trajectories, server, store)


async def test_the_same_through_the_gateway(store: Store) -> None:
    """C10, C32, C33."""
    with FakeVLLM(answer) as server, Gateway(StaticEndpoint(server.base_url, MODEL)) as gateway:
        llm = ChatOpenAI(model=MODEL, base_url=gateway.base_url, api_key=SecretStr("none"), max_retries=0)
        trajectories = await faulty_run(build(llm), server, store.sink(), SCENARIOS // 5)
        # The gateway sends again what a kept connection dropped: the client never knows.
        resent = len(server.bodies) - sum(len(t.steps) for t in trajectories)
        assert 0 < resent <= server.faults["drop"]
        check(trajectories, server, store, resent=resent)
