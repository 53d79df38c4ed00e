import random

import pytest
from helpers.training import failed, group, step, trajectory
from hypothesis import given
from hypothesis import strategies as st

from art_core.training.advantages import group_advantages, step_advantages

REWARDS = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=12)


def test_a_reward_is_measured_against_the_groups_mean():
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]


def test_division_by_the_standard_deviation_is_a_choice():
    assert group_advantages([1.0, 0.0, 0.0, 1.0], std=True) == [1.0, -1.0, -1.0, 1.0]


@pytest.mark.parametrize("rewards", [[], [1.0], [0.5] * 4, [0.1] * 3, [0.7] * 8, [0.1 + 0.2, 0.3, 0.3]])
@pytest.mark.parametrize("std", [False, True])
def test_rewards_equal_up_to_float_noise_teach_nothing(rewards: list[float], std: bool):
    """C26"""
    assert group_advantages(rewards, std=std) is None


@given(REWARDS, st.booleans(), st.randoms())
def test_advantages_go_with_their_rewards_whatever_the_order(
    rewards: list[float], std: bool, dice: random.Random
):
    """C27"""
    order = list(range(len(rewards)))
    dice.shuffle(order)
    straight = group_advantages(rewards, std=std)
    shuffled = group_advantages([rewards[i] for i in order], std=std)
    if straight is None:
        assert shuffled is None
    else:
        assert shuffled == [straight[i] for i in order]
        assert sum(straight) == pytest.approx(0, abs=1e-6)


def test_failed_and_unscored_rollouts_are_not_in_the_baseline():
    """C33"""
    members = group(
        trajectory("a", 1.0, step("a1", [1], [2])),
        failed("b", step("b1", [1], [3])),
        trajectory("c", 0.0, step("c1", [1], [4])),
        trajectory("d", None, step("d1", [1], [5])),
    )
    assert step_advantages(members) == {"a": {"a1": 0.5}, "c": {"c1": -0.5}}


def test_every_step_of_a_rollout_has_the_rollouts_advantage():
    members = group(
        trajectory("a", 1.0, step("a1", [1], [2]), step("a2", [1, 2], [3])),
        trajectory("b", 0.0, step("b1", [1], [4])),
    )
    assert step_advantages(members) == {"a": {"a1": 0.5, "a2": 0.5}, "b": {"b1": -0.5}}


def test_rewards_of_nodes_are_compared_within_the_node():
    from dataclasses import replace

    def member(name: str, plan: float, write: float):
        steps = (step(f"{name}p", [1], [2], node="plan"), step(f"{name}w", [1], [3], node="write"))
        return replace(trajectory(name, None, *steps), node_rewards={"plan": plan, "write": write})

    members = group(member("a", 1.0, 0.2), member("b", 0.0, 0.2))
    assert step_advantages(members) == {"a": {"ap": 0.5}, "b": {"bp": -0.5}}


def test_a_superseded_attempt_is_in_no_nodes_baseline():
    """C11."""
    from dataclasses import replace

    def member(name: str, reward: float, attempts: int):
        steps = [
            step(f"{name}{n}", [1], [2], node="plan", namespace=f"plan:{name}", attempt=n)
            for n in range(1, attempts + 1)
        ]
        return replace(trajectory(name, None, *steps), node_rewards={"plan": reward})

    retried = group(member("a", 1.0, 3), member("b", 0.0, 1))
    assert step_advantages(retried) == {"a": {"a3": 0.5}, "b": {"b1": -0.5}}
