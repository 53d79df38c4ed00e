"""What judges took is counted, also where they are a part of a composed reward."""

import asyncio
import time
from typing import Any

import pytest
from helpers.judges import FunctionJudge, perfect, quality_run

from art_core.gather import agather
from art_core.judgings import JUDGINGS
from art_core.observe.gathered import gathered_metrics
from art_core.observe.phases import Phases, Training
from art_core.recording import NullSink, current_rollout, new_id
from art_core.rewards import Ruler, ascore_trajectories, component
from art_core.rewards.judge import Answer
from art_core.rewards.shape import Price
from art_core.types import PolicyVersion, Scenario, Step, Trajectory, TrajectoryGroup

JUDGE_SECONDS = 0.05


class SlowJudge(FunctionJudge):
    """Takes a while, so that its time can be told from the agent's."""

    async def ask(self, messages: Any, schema: Any) -> Answer:
        await asyncio.sleep(JUDGE_SECONDS)
        return await super().ask(messages, schema)


@component
def polite(trajectory: Trajectory) -> float:
    return 0.5


async def agent(scenario: Scenario) -> str:
    rollout = current_rollout()
    assert rollout is not None
    said = {"role": "assistant", "content": f"I am {rollout.id}."}
    step = Step(
        id=new_id("s"),
        rollout_id=rollout.id,
        messages=({"role": "user", "content": "Go."},),
        model="agent@0",
        started_at=time.time(),
        duration=0.0,
        response=said,
        policy=PolicyVersion("agent", 0),
    )
    rollout.record(step)
    return "done"


def half(messages: Any) -> str:
    return '{"scores": [{"id": "1", "explanation": "", "score": 0.5}]}'


async def test_calls_tokens_cost_and_time_of_a_judge_inside_a_sum_are_counted() -> None:
    ruler = Ruler(SlowJudge(half), price=Price(prompt=2e6, completion=1e6))
    quality = component(ruler.ascore_one, name="quality")
    began = time.time()
    gathered = await agather(
        agent,
        [Scenario("go"), Scenario("stop")],
        group_size=3,
        reward=0.6 * quality + 0.4 * polite,
        sink=NullSink(),
        progress=False,
    )
    groups = list(gathered)
    assert [t.failure for g in groups for t in g] == [None] * 6
    told = gathered_metrics(groups)
    usage = ruler.usage
    assert usage.calls == 6, "each of them said something else"
    assert told["judge_calls"] == usage.calls
    assert told["judge_prompt_tokens"] == usage.prompt_tokens == 600
    assert told["judge_completion_tokens"] == usage.completion_tokens == 60
    assert told["judge_cost"] == pytest.approx(1260.0)
    times = Phases(began).metrics(groups, Training(time.time(), time.time(), time.time(), time.time()))
    assert times["time/judge"] >= JUDGE_SECONDS * 0.9
    assert times["time/rollout"] + times["time/judge"] <= times["time/step"]


async def test_judges_of_a_reward_that_came_to_nothing_are_counted_too() -> None:
    ruler = Ruler(FunctionJudge(lambda _: "no idea"))
    gathered = await agather(
        agent,
        [Scenario("go")],
        group_size=2,
        reward=component(ruler.ascore_one, name="quality") + polite,
        on_failure="drop_trajectory",
        min_group_size=0,
        sink=NullSink(),
        progress=False,
    )
    [kept] = gathered.failed[0].metadata[JUDGINGS]
    assert kept["calls"] == 2, "asked, and asked again"
    assert len(gathered.failed) == 2


async def test_scoring_again_replaces_what_judges_took_for_the_earlier_reward() -> None:
    ruler = Ruler(FunctionJudge(perfect))
    given = [quality_run("a", 0.2), quality_run("b", 0.7)]
    reward = component(ruler.ascore_one, name="quality") + component(ruler.ascore_one, name="again")
    once = await ascore_trajectories(reward, given)
    assert [len(t.metadata[JUDGINGS]) for t in once] == [2, 2]
    told = gathered_metrics([TrajectoryGroup(Scenario("go"), tuple(once), "g")])
    assert told["judge_calls"] == ruler.usage.calls
    rules = await ascore_trajectories(polite, once)
    assert all(JUDGINGS not in t.metadata for t in rules)
    assert "judge_calls" not in gathered_metrics([TrajectoryGroup(Scenario("go"), tuple(rules), "g")])


async def test_judgements_outside_of_a_reward_are_kept_nowhere() -> None:
    ruler = Ruler(FunctionJudge(perfect))
    assert (await ruler.ascore_one(quality_run("a", 0.7))).total == pytest.approx(0.7)
