"""Learning graphs that people stop, that users change, and that go on for longer."""

from collections import Counter
from typing import Any

import pytest
from helpers.killable_graph import NODES
from helpers.learning_graphs import THREAD, TWO, an_agent, reward
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from art_core import TrainableModel
from art_core.rewards import Ruler
from art_core.store import Metric, Store
from art_langgraph import (
    LangChainJudge,
    LearningLoop,
    LearningState,
    learning_builder,
    learning_graph,
)


def test_a_person_looks_before_each_training_and_takes_out_what_is_wrong(model: TrainableModel) -> None:
    graph = learning_graph(
        an_agent(model),
        model,
        TWO,
        steps=2,
        group_size=3,
        reward=reward,
        checkpointer=InMemorySaver(),
        interrupt_before=["train"],
    )
    graph.invoke({}, THREAD)
    seen = graph.get_state(THREAD)
    assert seen.next == ("train",)
    assert model.current_version().number == 0
    first, *others = seen.values["rollouts"]
    graph.update_state(THREAD, {"excluded": [others[-1]["group"]]})
    model.store.score(first["trajectory"], 99.0, author="ann")
    graph.invoke(None, THREAD)
    (made,) = graph.get_state(THREAD).values["history"]
    assert (made["rollouts"], made["unscored"], made["updated"]) == (6, 3, True)
    rewards = [r["reward"] for r in others if r["group"] == first["group"]]
    assert made["reward_mean"] == pytest.approx((99.0 + sum(rewards)) / 3)
    assert model.last_update is not None
    assert model.last_update.groups == (first["group"],)


class Reviewed(LearningState):
    reviews: list[str]


def test_a_graph_of_ones_own_has_more_nodes_and_other_routes(model: TrainableModel) -> None:
    loop = LearningLoop(an_agent(model), model, TWO, steps=9, group_size=2, reward=reward)

    def review(state: Reviewed) -> Command[str]:
        answer = interrupt({"step": state["step"], "reward": state["history"][-1]["reward_mean"]})
        return Command(update={"reviews": [*state.get("reviews", []), answer]}, goto=answer)

    builder = StateGraph(Reviewed)
    for name in ("plan", "rollout", "collect", "train"):
        builder.add_node(name, getattr(loop, name))
    builder.add_node("review", review, destinations=("plan", END))
    builder.add_edge(START, "plan").add_conditional_edges(
        "plan", loop.after_plan, {"rollout": "rollout", "end": END}
    )
    builder.add_edge("rollout", "collect").add_edge("collect", "train").add_edge("train", "review")
    graph = builder.compile(checkpointer=InMemorySaver())
    (asked,) = graph.invoke({}, THREAD)["__interrupt__"]
    assert asked.value["step"] == 1
    graph.invoke(Command(resume="plan"), THREAD)
    state = graph.invoke(Command(resume=END), THREAD)
    assert state["reviews"] == ["plan", END]
    assert [made["step"] for made in state["history"]] == [1, 2]


def test_the_ready_graph_is_drawn_with_the_nodes_that_it_has(model: TrainableModel) -> None:
    ruler = Ruler(LangChainJudge(ChatOpenAI(model="m", api_key="none")))  # type: ignore[arg-type]
    plain = learning_graph(an_agent(model), model, TWO, steps=1, reward=reward).get_graph()
    assert set(plain.nodes) == {"__start__", "plan", "rollout", "collect", "train", "__end__"}
    full = learning_graph(
        an_agent(model), model, TWO, steps=1, ruler=ruler, evaluate_every=1, evaluation_reward=reward
    ).get_graph()
    assert set(full.nodes) == {*NODES, "__start__", "__end__"}
    edges = {(edge.source, edge.target) for edge in full.edges}
    assert {("collect", "judge"), ("judge", "train"), ("train", "plan"), ("evaluate", "plan")} <= edges
    loop = LearningLoop(an_agent(model), model, TWO, steps=1, reward=reward)
    assert set(learning_builder(loop).nodes) == {"plan", "rollout", "collect", "train"}


def logged(store: Store, run_id: str) -> list[Metric]:
    return store.metrics(run_id, "evaluation/reward_mean")


async def test_a_finished_run_goes_on_when_it_is_given_more_steps(model: TrainableModel) -> None:
    saver = InMemorySaver()

    def graph(steps: int) -> Any:
        options: Any = {"reward": reward, "group_size": 2, "evaluate_every": 2, "evaluation_size": 2}
        return learning_graph(an_agent(model), model, TWO, steps=steps, checkpointer=saver, **options)

    first = await graph(1).ainvoke({}, THREAD)
    assert [made["step"] for made in first["evaluations"]] == [0, 1]
    assert (await graph(1).ainvoke({}, THREAD))["history"] == first["history"]
    events = [event async for event in graph(3).astream({}, THREAD, stream_mode="custom")]
    state = graph(3).get_state(THREAD).values
    assert [made["step"] for made in state["history"]] == [1, 2, 3]
    assert [made["step"] for made in state["evaluations"]] == [0, 1, 2, 3]
    assert [event["event"] for event in events if event["event"] not in ("rollout", "trial")] == [
        *("collected", "trained", "evaluated"),
        *("collected", "trained", "evaluated"),
    ]
    assert [e["done"] for e in events if e["event"] == "trial"] == [1, 2, 3, 4] * 2
    kept = {metric.step: metric.value for run in model.store.runs() for metric in logged(model.store, run.id)}
    assert kept == {made["step"]: made["reward_mean"] for made in state["evaluations"]}
    trials = [t for t in model.store.trajectories() if t.metadata["kind"] == "trial"]
    assert len(trials) == 4 * 4
    seeds = Counter((t.scenario.id, t.metadata["seed"]) for t in trials)
    assert set(seeds.values()) == {4}, "an evaluation differs from another in the policy alone"
    rollouts = [t for t in model.store.trajectories() if t.metadata["kind"] == "rollout"]
    assert len({(t.scenario.id, t.metadata["seed"]) for t in rollouts}) == len(rollouts) == 3 * 4
