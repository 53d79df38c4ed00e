"""Steps of a learning graph that teach nothing, and what does not fit together and so trains nothing."""

from pathlib import Path
from typing import Any

import pytest
from fakes.vllm_server import FakeVLLM
from helpers.learning_graphs import THREAD, TWO, an_agent, registered, reward, verdict
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

from art_core import TrainableModel
from art_core.errors import CheckpointError, ConfigError, RolloutFailedError
from art_core.rewards import Ruler
from art_langgraph import (
    LangChainJudge,
    learning_graph,
)
from art_langgraph.learning_loop import IN_VAIN


def test_a_group_without_a_verdict_is_not_trained_though_it_has_a_rule_reward(model: TrainableModel) -> None:
    """C33: the judge is silent about one of the two scenarios."""

    def partly(request: dict[str, Any]) -> str:
        return "" if "say 0" in str(request["messages"]) else verdict(request)

    with FakeVLLM(partly) as server:
        judge = ChatOpenAI(model="judge", base_url=server.base_url, api_key="none", max_retries=0)  # type: ignore[arg-type]
        state = learning_graph(
            an_agent(model),
            model,
            TWO,
            steps=1,
            group_size=3,
            reward=reward,
            ruler=Ruler(LangChainJudge(judge)),
            combine=lambda t, score: (t.reward or 0.0) + score,
        ).invoke({})
    (made,) = state["history"]
    assert (made["rollouts"], made["failed"], made["unscored"]) == (6, 0, 3)
    assert model.last_update is not None
    (trained,) = model.last_update.groups
    assert model.store.group(trained).scenario.id == "s1"
    assert all(t.reward is not None for t in model.store.trajectories()), "the rule's stays on record"


def test_a_step_whose_rollouts_failed_is_passed_over_and_many_in_a_row_are_an_error(
    model: TrainableModel,
) -> None:
    """C33."""
    half = an_agent(model, broken=["say 0"])
    state = learning_graph(
        half, model, TWO, steps=2, group_size=2, scenarios_per_step=1, reward=reward
    ).invoke({})
    by_reason = {bool(made["skipped"]): made for made in state["history"]}
    assert by_reason[True]["failed"] == 2
    assert by_reason[True]["reward_mean"] is None
    assert "first failure: exception: no such tool" in by_reason[True]["skipped"]
    assert by_reason[False]["updated"]
    assert model.current_version().number == 1
    broken = an_agent(model, broken=["say 0", "say 1"])
    graph = learning_graph(
        broken, model, TWO, steps=99, group_size=2, reward=reward, checkpointer=InMemorySaver()
    )
    with pytest.raises(RolloutFailedError, match=f"last {IN_VAIN} steps had nothing to train.*no such tool"):
        graph.invoke({}, THREAD)
    assert len(graph.get_state(THREAD).values["history"]) == IN_VAIN - 1
    assert model.current_version().number == 1


def test_a_model_that_is_not_as_far_as_the_graph_is_not_trained(base: str, tmp_path: Path) -> None:
    saver = InMemorySaver()

    def graph(model: TrainableModel) -> Any:
        return learning_graph(
            an_agent(model), model, TWO, steps=2, group_size=2, reward=reward, checkpointer=saver
        )

    with registered(base, tmp_path / "one") as model:
        graph(model).invoke({}, THREAD, interrupt_before=["train"])
        graph(model).invoke(None, THREAD, interrupt_before=["train"])
        assert model.current_version().number == 1
        left = graph(model).get_state(THREAD).values["rollouts"]
        members = [model.store.trajectory(rollout["trajectory"]) for rollout in left]
    with registered(base, tmp_path / "other") as model:
        for member in members:
            model.store.save_trajectory(member)
        with pytest.raises(CheckpointError, match=r"version 1, and model 'agent' is at version 0"):
            graph(model).invoke(None, THREAD)
        assert model.last_update is None


def test_a_graph_that_is_older_than_the_model_trains_nothing_twice(model: TrainableModel) -> None:
    """As after ``durability="exit"`` and a kill: the model has made two steps that the graph knows not."""
    graph = learning_graph(
        an_agent(model), model, TWO, steps=3, group_size=3, reward=reward, checkpointer=InMemorySaver()
    )
    graph.invoke({}, THREAD, interrupt_before=["train"])
    before = graph.get_state(THREAD)
    graph.invoke(None, THREAD, interrupt_before=["train"])
    graph.invoke(None, THREAD, interrupt_before=["train"])
    assert model.current_version().number == 2
    with pytest.raises(CheckpointError, match="step 1 was trained before, and the model has gone on"):
        graph.invoke(None, before.config)
    assert model.current_version().number == 2


def test_the_newest_version_says_what_it_was_made_from_also_after_a_restart(
    base: str, tmp_path: Path
) -> None:
    with registered(base, tmp_path) as model:
        assert model.last_update is None
        learning_graph(an_agent(model), model, TWO, steps=1, group_size=3, reward=reward).invoke({})
        first = model.last_update
        assert first is not None
        assert first.version == model.current_version()
        members = [t.group_id for t in model.store.trajectories(with_steps=False)]
        assert set(first.groups) == set(members)
    with registered(base, tmp_path) as model:
        again = model.last_update
        assert again is not None
        assert (again.version, again.groups) == (first.version, first.groups)
        assert again.report.metrics == pytest.approx(dict(first.report.metrics))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"reward": None}, "nothing scores the rollouts"),
        ({"steps": 0}, "steps=0"),
        ({"group_size": 0}, "group_size=0"),
        ({"scenarios_per_step": 0}, "scenarios_per_step=0"),
        ({"group_size": 2, "min_group_size": 3}, "min_group_size=3"),
        ({"evaluate_every": 0}, "evaluate_every=0"),
        ({"evaluation_scenarios": []}, "evaluation_scenarios=0"),
        ({"scenarios": []}, "is there a scenario"),
        ({"combine": max}, "no ruler"),
        ({"reward": None, "ruler": "any", "evaluate_every": 1}, "ruler.ascore_one"),
        ({"timeout": 0}, "timeout=0"),
        ({"config": {"configurable": {"thread_id": "1"}}}, "thread_id"),
    ],
)
def test_what_makes_no_learning_run_is_refused_before_anything_runs(
    wrong: dict[str, Any], message: str
) -> None:
    if "ruler" in wrong:
        wrong = {**wrong, "ruler": Ruler(LangChainJudge(ChatOpenAI(model="m", api_key="none")))}  # type: ignore[arg-type]
    options: dict[str, Any] = {"steps": 1, "reward": reward, "scenarios": TWO, **wrong}
    model = TrainableModel(base_model="nowhere")
    with pytest.raises(ConfigError, match=message):
        learning_graph(lambda scenario: None, model, **options)
