"""One run of an agent with a judge, failures and a KL term writes every figure that people look for."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import pytest
from helpers.judges import FunctionJudge, runs, told
from helpers.tiny import tiny_model
from langgraph.graph import START, StateGraph

from art_core import LocalBackend, TrainableModel
from art_core.config import TrainConfig
from art_core.observe.metrics import spec_of
from art_core.rewards import Price, Ruler
from art_core.scoring import Reward
from art_core.types import Message, Scenario, Trajectory
from art_langgraph import ChatART, agather

LOOKED_FOR = (
    *("reward_mean", "reward_std", "reward_group_std", "success_rate", "groups_without_spread"),
    *("reward/component/ruler", "reward/component_std/ruler", "trajectories_failed", "failures/exception"),
    *("kl_old_new", "kl_base", "entropy", "clip_fraction", "effective_sample_size"),
    *("behaviour_ratio_p50", "behaviour_ratio_p99", "grad_norm", "learning_rate"),
    *("tokens_sampled", "entries", "unique_share", "fork_rate", "staleness_mean", "staleness_max"),
    *("tokens_per_second/rollout", "tokens_per_second/train"),
    *("time/step", "time/rollout", "time/judge", "time/train", "time/publish", "time/wait"),
    *("judge_calls", "judge_prompt_tokens", "judge_completion_tokens", "judge_cost"),
    *(f"node/{node}/{what}" for node in ("plan", "write") for what in ("calls", "tokens", "latency")),
    "node/plan/reward",
)
"""GPU memory is there where there is a GPU."""


class State(TypedDict, total=False):
    task: str
    plan: str


def planner_and_writer(model: TrainableModel):
    planner, writer = ChatART(model, max_tokens=2), ChatART(model, max_tokens=4)
    writing = itertools.count(1)

    async def plan(state: State) -> State:
        return {"plan": (await planner.ainvoke(f"plan {state['task']}")).text}

    async def write(state: State) -> State:
        await writer.ainvoke(f"write {state['plan']}")
        if next(writing) == 4:
            raise ConnectionError("the library is closed")
        return {}

    builder = StateGraph(State)
    builder.add_node("plan", plan)
    builder.add_node("write", write)
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "write")
    return builder.compile()


def by_node(trajectory: Trajectory, _state: State) -> Reward:
    return Reward(0.0, by_node={"plan": float(len(trajectory.steps[0].message()) % 3)})


def ranked(messages: Sequence[Message]) -> str:
    """What a judge says that likes each run better than the one before."""
    names = list(runs(messages))
    return told([(name, place / len(names)) for place, name in enumerate(names, 1)])


async def test_a_run_with_everything_writes_every_figure_that_people_look_for(tmp_path: Path) -> None:
    config = TrainConfig(learning_rate=1e-3, kl_coef=0.1, success_reward=0.5)
    base = str(tiny_model(tmp_path / "base"))
    ruler = Ruler(FunctionJudge(ranked), price=Price(prompt=1.0, completion=10.0))
    with TrainableModel(base_model=base, project="p", name="agent", lora_rank=4, train=config) as model:
        model.register(LocalBackend(root=tmp_path, dtype="float32", max_model_len=256))
        scenarios = [Scenario("a", {"task": "a"}), Scenario("b", {"task": "b"})]
        groups = list(
            await agather(planner_and_writer(model), scenarios, group_size=4, model=model, reward=by_node)
        )
        judgements = await ruler.ascore_groups(groups)
        await model.atrain(
            [judgement.apply(group) for judgement, group in zip(judgements, groups, strict=True)]
        )
        (run,) = model.store.runs()
        told_of = {metric.name: metric.value for metric in model.store.metrics(run.id)}
    assert [name for name in LOOKED_FOR if name not in told_of] == []
    assert [name for name in told_of if spec_of(name) is None] == []
    assert all(math.isfinite(told_of[name]) for name in LOOKED_FOR)
    assert (told_of["trajectories"], told_of["trajectories_failed"]) == (8, 1)
    assert told_of["failures/exception"] == 1
    assert told_of["judge_calls"] == ruler.usage.calls
    assert told_of["judge_cost"] == pytest.approx(ruler.usage.cost(Price(prompt=1.0, completion=10.0)))
    assert told_of["node/plan/tokens"] <= 2
    assert 0 < told_of["unique_share"] <= 1
