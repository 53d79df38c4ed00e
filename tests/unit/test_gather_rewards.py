"""Rewards of gathered rollouts, and reward functions that fail."""

import asyncio

import pytest
from helpers.gathering import THREE, Log, say, talk

from art_core.errors import RewardError
from art_core.gather import agather
from art_core.recording import current_rollout
from art_core.types import RolloutStatus, Scenario


def raising(trajectory):
    raise KeyError("no such key")


async def hanging(trajectory):
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (raising, "no such key"),
        (lambda t: float("nan"), "the reward is nan"),
        (lambda t: float("inf"), "the reward is inf"),
        (lambda t: None, "got NoneType"),
        (lambda t: True, "got bool"),
        (lambda t: "0.5", "got str"),
        (lambda t: {"won": float("nan")}, "component 'won'"),
        (lambda t: {}, "no components"),
        (hanging, "no result within"),
    ],
)
async def test_a_reward_function_that_fails_fails_the_rollout_and_is_never_a_zero(reward, message) -> None:
    """C33, C32."""
    (group,) = await agather(
        talk, [Scenario("s")], group_size=2, reward=reward, min_group_size=0,
        timeout=0.3 if reward is hanging else 60,
    )  # fmt: skip
    for trajectory in group:
        assert trajectory.failed
        assert trajectory.reward is None
        assert trajectory.failure.cause == "reward"
        assert message in trajectory.failure.message
        assert len(trajectory.steps) == 1


class Judge:
    async def __call__(self, trajectory, output):
        return 0.25 if output == "done s" else 0.0


async def slow(trajectory):
    await asyncio.sleep(0)
    return 0.25


@pytest.mark.parametrize(
    "reward",
    [
        lambda t: 0.25,
        lambda t, output: 0.25 * (output == "done s"),
        lambda t: {"won": 1.0, "length": -0.75},
        lambda t, verbose=True: 0.25 if verbose else 0.0,
        lambda t, output=None: 0.25 * (output == "done s"),
        lambda t: slow(t),
        lambda *everything: 0.25 * len(everything),
        slow,
        Judge(),
    ],
)
async def test_a_reward_may_be_sync_or_async_and_see_the_output_or_not(reward) -> None:
    (group,) = await agather(talk, [Scenario("s")], group_size=1, reward=reward)
    assert group.rewards == (0.25,)


async def test_named_parts_are_kept_and_their_sum_is_the_reward() -> None:
    (group,) = await agather(
        talk, [Scenario("s")], group_size=1, reward=lambda t: {"won": 1.0, "length": -0.25}
    )
    assert group.trajectories[0].components == {"won": 1.0, "length": -0.25}
    assert group.rewards == (0.75,)


async def test_a_full_reward_scores_nodes_steps_and_metrics_too() -> None:
    from art_core.scoring import Reward

    def reward(t) -> Reward:
        return Reward(1.0, {"won": 1.0}, {"planner": 0.5}, {t.steps[0].id: 0.25}, {"moves": 3.0})

    (group,) = await agather(talk, [Scenario("s")], group_size=1, reward=reward)
    (t,) = group
    assert (t.reward, t.node_rewards, t.metrics) == (1.0, {"planner": 0.5}, {"moves": 3.0})
    assert t.step_rewards == {t.steps[0].id: 0.25}


async def test_a_reward_function_with_the_wrong_arguments_is_refused_before_anything_runs() -> None:
    sink = Log()
    with pytest.raises(RewardError, match=r"must take \(trajectory\) or \(trajectory, output\)"):
        await agather(talk, THREE, group_size=2, reward=lambda a, b, c: 1.0, sink=sink)
    assert not sink.begun


async def test_what_the_judge_says_is_no_step_of_the_rollout() -> None:
    async def reward(trajectory) -> float:
        assert current_rollout() is None
        assert trajectory.status is RolloutStatus.FINISHED
        return 1.0

    (group,) = await agather(talk, [Scenario("s")], group_size=1, reward=reward)
    assert group.rewards == (1.0,)


async def test_the_output_is_kept_if_json_can_hold_it() -> None:
    async def agent(scenario: Scenario):
        say()
        return {"answer": 42} if scenario.id == "a" else object()

    groups = await agather(agent, THREE[:2], group_size=1)
    assert groups[0].trajectories[0].metadata["output"] == {"answer": 42}
    assert "output" not in groups[1].trajectories[0].metadata


async def test_an_agent_may_end_its_own_rollout() -> None:
    async def agent(scenario: Scenario) -> None:
        say()
        current_rollout().finish(0.5)

    (group,) = await agather(agent, [Scenario("s")], group_size=1, reward=lambda t: 1.0)
    assert group.rewards == (0.5,)
