"""The learning run as a LangGraph: a real tiny policy on the embedded engine, a judge over real HTTP."""

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.vllm_server import FakeVLLM
from helpers.judges import runs, told
from helpers.killable_graph import GROUP_SIZE, NODES, PER_STEP, SCENARIOS, STEPS
from helpers.tiny import tiny_model
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from art_core import LocalBackend, TrainableModel
from art_core.errors import CheckpointError, ConfigError, RolloutFailedError
from art_core.observe.metrics import spec_of
from art_core.rewards import Ruler
from art_core.store import Metric, Store
from art_core.types import RolloutStatus, Scenario, Trajectory
from art_langgraph import (
    ChatART,
    LangChainJudge,
    LearningLoop,
    LearningState,
    learning_builder,
    learning_graph,
)
from art_langgraph.learning_loop import IN_VAIN

HERE = Path(__file__)
THREAD: Any = {"configurable": {"thread_id": "run"}}
TWO = [Scenario(f"s{i}", {"messages": [("user", f"say {i}")]}) for i in range(2)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("base") / "model"))


def registered(base: str, root: Path) -> TrainableModel:
    model = TrainableModel(base_model=base, project="p", name="agent", lora_rank=4, learning_rate=1e-2)
    model.register(LocalBackend(root=root, dtype="float32", max_model_len=128, deterministic=True))
    return model


@pytest.fixture
def model(base: str, tmp_path: Path) -> Iterator[TrainableModel]:
    with registered(base, tmp_path) as model:
        yield model


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


# -- killed, and resumed -------------------------------------------------------------------------------

POINTS = [
    *(f"{node}:{when}:1" for node in ("plan", "trial", "evaluate") for when in ("enter", "exit")),
    *("rollout:enter:3", "rollout:exit:1", "rollout:exit:1", "collect:enter:1", "collect:exit:1"),
    *("judge:enter:1", "judge:exit:1", "judge:exit:1", "train:enter:1", "save", "train:exit:1"),
    # In the second step, between what training keeps; the second of them while that is being made good.
    *("rollout:exit:1", "metrics", "version", "plan:exit:1"),
]
"""Where each life ends. What was done before is not called again, so only a first call is sure to come."""


def lived(base: str, root: Path, points: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Run to the end through all these deaths; the last state, and the questions that the judge was asked."""
    script = HERE.parents[1] / "helpers" / "killable_graph.py"
    path = os.pathsep.join([str(HERE.parents[2]), str(HERE.parents[1])])
    with FakeVLLM(verdict) as judge:
        done = subprocess.run(
            [sys.executable, str(script), base, str(root), judge.base_url, *points],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=560,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        questions = [json.dumps(body["messages"]) for body in judge.bodies]
    return json.loads((root / "state.json").read_text()), questions


def weights(root: Path) -> dict[str, bytes]:
    found = sorted((root / "p/agent/checkpoints").glob("checkpoint-*/adapter/adapter_model.safetensors"))
    return {path.parts[-3]: path.read_bytes() for path in found}


def figures(store: Store) -> dict[int, dict[str, float]]:
    """What the record says of each training step, whichever life said it; without times."""
    found: dict[int, dict[str, float]] = {}
    for run in store.runs():
        for metric in store.metrics(run.id):
            found.setdefault(metric.step, {})[metric.name] = metric.value
    return found


def without_ids(state: dict[str, Any]) -> list[Any]:
    """What a state says, without the ids that follow from the run's."""
    ids = {"group", "trajectory"}
    records = [*state["rollouts"], *state["trials"], *state["scores"]]
    plain = [{k: v for k, v in record.items() if k not in ids} for record in records]
    return [state["step"], state["policy"], state["history"], state["evaluations"], plain]


@pytest.mark.timeout(600)  # 22 processes one after the other
def test_a_run_that_was_killed_at_every_node_ends_as_one_that_never_was(base: str, tmp_path: Path) -> None:
    """C50."""
    assert {point.split(":")[0] for point in POINTS} >= set(NODES)
    whole, asked = lived(base, tmp_path / "whole", ())
    killed, asked_again = lived(base, tmp_path / "killed", POINTS)
    assert without_ids(killed) == without_ids(whole)
    assert [record["updated"] for record in whole["history"]] == [True] * STEPS
    assert list(weights(tmp_path / "whole")) == list(weights(tmp_path / "killed")) != []
    assert weights(tmp_path / "whole") == weights(tmp_path / "killed")
    assert sorted(asked_again) == sorted(asked)
    assert len(set(asked)) == len(asked), "no question was paid twice"
    with Store.open("p", tmp_path / "whole") as one, Store.open("p", tmp_path / "killed") as other:
        names = [name for name in whole["metrics"] if (s := spec_of(name)) is None or s.unit != "seconds"]
        assert {"loss", "grad_norm", "entropy", "reward_mean"} <= {*names}
        expected, found = figures(one), figures(other)
        assert expected.keys() == found.keys() == set(range(STEPS + 1))
        assert expected.pop(0) == found.pop(0), "the evaluation before the first step"
        for step, values in expected.items():
            assert {k: values[k] for k in names} == {k: found[step][k] for k in names}
        assert [v.policy for v in other.versions("agent")] == [v.policy for v in one.versions("agent")]
        for store in (one, other):
            ended = [t for t in store.trajectories(with_steps=False) if t.status is not RolloutStatus.RUNNING]
            kinds = Counter(t.metadata["kind"] for t in ended)
            assert kinds == {"rollout": STEPS * PER_STEP * GROUP_SIZE, "trial": 3 * len(SCENARIOS)}
            for trajectory in ended:
                authors = [score.author for score in store.scores(trajectory.id)]
                judged = ["ruler:judge"] if trajectory.metadata["kind"] == "rollout" else []
                assert authors == ["rollout", *judged]
                trained = {step.train_step for step in store.trained(trajectory.id)}
                assert trained <= {trajectory.metadata["batch"]}
                assert bool(trained) <= (trajectory.metadata["kind"] == "rollout")


# -- stopped by people, changed by users ---------------------------------------------------------------


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


# -- steps that teach nothing --------------------------------------------------------------------------


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


# -- what does not fit ---------------------------------------------------------------------------------


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
