"""Which nodes of a graph are trained, and what each of them earned: from a real graph to the gradient."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import pytest
import torch
from helpers.tiny import tiny_model
from helpers.training import group, sample, step, trajectory
from langgraph.graph import START, StateGraph

from art_core import LocalBackend, TrainableModel
from art_core.config import LoRAConfig, TrainConfig
from art_core.errors import ConfigError, NothingToTrainError
from art_core.scoring import Reward
from art_core.selection import NOT_SELECTED, OTHER_POLICY, Nodes
from art_core.training.grpo import Trainer
from art_core.training.peft_policy import PeftPolicy
from art_core.training.policy import TRAINING
from art_core.types import Scenario, Trajectory, TrajectoryGroup
from art_langgraph import ChatART, agather


class State(TypedDict, total=False):
    task: str
    plan: str
    text: str


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainableModel]:
    root = tmp_path_factory.mktemp("by-node")
    base = str(tiny_model(root / "base"))
    with TrainableModel(base_model=base, project="p", name="agent", lora_rank=4) as model:
        model.register(LocalBackend(root=root, dtype="float32", max_model_len=256))
        yield model


def planner_and_writer(model: TrainableModel):
    planner, writer = ChatART(model, max_tokens=2), ChatART(model, max_tokens=5)

    async def plan(state: State) -> State:
        return {"plan": (await planner.ainvoke(f"plan {state['task']}")).text}

    async def write(state: State) -> State:
        return {"text": (await writer.ainvoke(f"write {state['plan']}")).text}

    builder = StateGraph(State)
    builder.add_node("plan", plan)
    builder.add_node("write", write)
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "write")
    return builder.compile()


def sampled(trajectories: list[Trajectory], *nodes: str) -> int:
    """Tokens that nodes sampled."""
    return sum(
        len(s.tokens.completion)
        for t in trajectories
        for s in t.steps
        if s.tokens and s.identity.node in nodes
    )


async def played(model: TrainableModel, reward) -> list[TrajectoryGroup]:
    scenarios = [Scenario("a", {"task": "a"}), Scenario("b", {"task": "b"})]
    gathered = await agather(planner_and_writer(model), scenarios, group_size=3, model=model, reward=reward)
    return list(gathered)


async def test_only_the_chosen_nodes_tokens_are_trained(model: TrainableModel) -> None:
    """C07, from the graph to the gradient."""
    counter = iter(range(100))
    groups = await played(model, lambda trajectory: float(next(counter)))
    everyone = [t for g in groups for t in g]
    before = model.current_version().number
    report = await model.atrain(groups, train=Nodes("plan"))
    assert report.metrics["entries"] == sampled(everyone, "plan") > 0
    assert report.left_out == {NOT_SELECTED: 6}
    assert model.current_version().number == before + 1
    both = await model.atrain(groups, train=Nodes("plan") | (lambda step: step.identity.node == "write"))
    assert both.metrics["entries"] == sampled(everyone, "plan", "write")
    by_name = await model.atrain(groups, train="write")
    assert by_name.metrics["entries"] == sampled(everyone, "write")


async def test_two_models_in_one_graph_are_each_trained_on_what_they_said_themselves(
    model: TrainableModel, tmp_path: Path
) -> None:
    with TrainableModel(base_model=model.config.base_model, project="p", name="other", lora_rank=4) as other:
        other.register(LocalBackend(root=tmp_path, dtype="float32", max_model_len=256))
        mine, others = ChatART(model, max_tokens=2), ChatART(other, max_tokens=5)

        async def plan(state: State) -> State:
            return {"plan": (await mine.ainvoke(f"plan {state['task']}")).text}

        async def write(state: State) -> State:
            return {"text": (await others.ainvoke(f"write {state['plan']}")).text}

        graph = StateGraph(State).add_node("plan", plan).add_node("write", write)
        graph.add_edge(START, "plan").add_edge("plan", "write")
        scenarios = [Scenario("a", {"task": "a"})]
        groups = await agather(graph.compile(), scenarios, group_size=2, model=model, progress=False)
        members = [t.with_reward(float(i)) for i, t in enumerate(groups[0])]
        scored = [groups[0].with_trajectories(members)]
        for trained, node in ((model, "plan"), (other, "write")):
            report = await trained.atrain(scored)
            assert report.metrics["entries"] == sampled(members, node)
            assert report.left_out == {OTHER_POLICY: 2}


async def test_rewards_of_nodes_reach_the_trainer(model: TrainableModel) -> None:
    """Only the planner's rewards differ, so only it is trained; the rollouts need no reward as a whole."""
    counter = iter(range(100))
    groups = await played(model, lambda _: Reward(0.0, by_node={"plan": float(next(counter)), "write": 0.5}))
    groups = [g.with_trajectories([replace(t, reward=None) for t in g]) for g in groups]
    report = await model.atrain(groups)
    assert report.metrics["entries"] == sampled([t for g in groups for t in g], "plan") > 0


async def test_a_choice_that_names_nothing_is_an_error_and_changes_nothing(model: TrainableModel) -> None:
    counter = iter(range(100))
    groups = await played(model, lambda _: float(next(counter)))
    before = model.current_version()
    with pytest.raises(NothingToTrainError, match=f"12 x {NOT_SELECTED}"):
        await model.atrain(groups, train=Nodes("planer"))
    with pytest.raises(ConfigError, match="expected a selection"):
        await model.atrain(groups, train=3)  # type: ignore[arg-type]
    assert model.current_version() == before


# -- two nodes that learn different things -----------------------------------------------------------

ARMS = (10, 11, 12, 13)
PROMPTS = {"plan": (5, 6, 7), "write": (7, 6, 5)}
PAYS = {"plan": ARMS[2], "write": ARMS[0]}


def games(policy: PeftPolicy, generator: torch.Generator, size: int = 24) -> TrajectoryGroup:
    """Rollouts in which each node pulls an arm, sampled from the policy, each node with its own reward."""
    pulled: dict[str, list[tuple[int, float]]] = {}
    with torch.no_grad(), policy.using(TRAINING):
        for node, prompt in PROMPTS.items():
            hidden = policy.hidden_states(input_ids=torch.tensor([prompt])).last_hidden_state[:, -1]
            every = torch.log_softmax(policy.head(hidden).float(), -1)[0]
            drawn = torch.multinomial(every.exp(), size, replacement=True, generator=generator).tolist()
            pulled[node] = [(arm, float(every[arm])) for arm in drawn]
    rollouts: list[Trajectory] = []
    for i in range(size):
        steps = [
            step(f"{node}{i}", PROMPTS[node], [arms[i][0]], logprobs=[arms[i][1]], node=node)
            for node, arms in pulled.items()
        ]
        earned = {node: float(arms[i][0] == PAYS[node]) for node, arms in pulled.items()}
        rollouts.append(replace(trajectory(f"t{i}", None, *steps), node_rewards=earned))
    return group(*rollouts)


def earned(played: TrajectoryGroup, node: str) -> float:
    return sum(t.node_rewards[node] for t in played) / len(played)


@pytest.mark.parametrize("train", [None, "plan"])
def test_each_node_learns_what_it_was_rewarded_for(tmp_path: Path, train: str | None) -> None:
    base = tiny_model(tmp_path / "base", arch="llama", layers=1, hidden=256)
    policy = PeftPolicy.load(str(base), LoRAConfig(rank=4, alpha=8), dtype="float32", seed=0)
    undecided = [sample(p, [arm], step=f"{n}{arm}") for n, p in PROMPTS.items() for arm in ARMS]
    trainer = Trainer(policy, TrainConfig(learning_rate=1e-2))
    trainer.sft(undecided, batch_size=8, steps=40, learning_rate=1e-2)
    report = trainer.sft(undecided, batch_size=8, steps=1, learning_rate=1e-3)
    assert report.metrics["loss"] == pytest.approx(math.log(4), abs=0.2)
    generator = torch.Generator().manual_seed(0)
    history = [games(policy, generator)]
    for _ in range(15):
        trainer.train([history[-1]], train=train)
        history.append(games(policy, generator))
    assert max(earned(history[0], node) for node in PROMPTS) < 0.6
    assert earned(history[-1], "plan") > 0.9
    if train is None:
        assert earned(history[-1], "write") > 0.9
    else:
        assert earned(history[-1], "write") < 0.6
