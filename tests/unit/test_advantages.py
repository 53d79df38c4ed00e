import random
from dataclasses import replace
from typing import get_args

import pytest
from helpers.training import failed, group, step, trajectory
from hypothesis import given
from hypothesis import strategies as st

from art_core.config import AdvantageName, BaselineName
from art_core.training.advantages import group_advantages, step_advantages
from art_core.types import Trajectory, TrajectoryGroup

KINDS: tuple[AdvantageName, ...] = get_args(AdvantageName)
BASELINES: tuple[BaselineName, ...] = get_args(BaselineName)

REWARDS = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=12)


def test_a_reward_is_measured_against_the_groups_mean():
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]


def test_division_by_the_standard_deviation_is_a_choice():
    assert group_advantages([1.0, 0.0, 0.0, 1.0], "std") == [1.0, -1.0, -1.0, 1.0]


@pytest.mark.parametrize("rewards", [[], [1.0], [0.5] * 4, [0.1] * 3, [0.7] * 8, [0.1 + 0.2, 0.3, 0.3]])
@pytest.mark.parametrize("kind", KINDS)
def test_rewards_equal_up_to_float_noise_teach_nothing(rewards: list[float], kind: AdvantageName):
    """C26"""
    assert group_advantages(rewards, kind) is None


@given(REWARDS, st.sampled_from(KINDS), st.randoms())
def test_advantages_go_with_their_rewards_whatever_the_order(
    rewards: list[float], kind: AdvantageName, dice: random.Random
):
    """C27"""
    order = list(range(len(rewards)))
    dice.shuffle(order)
    straight = group_advantages(rewards, kind)
    shuffled = group_advantages([rewards[i] for i in order], kind)
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
    def member(name: str, plan: float, write: float):
        steps = (step(f"{name}p", [1], [2], node="plan"), step(f"{name}w", [1], [3], node="write"))
        return replace(trajectory(name, None, *steps), node_rewards={"plan": plan, "write": write})

    members = group(member("a", 1.0, 0.2), member("b", 0.0, 0.2))
    assert step_advantages(members) == {"a": {"ap": 0.5}, "b": {"bp": -0.5}}


def test_a_superseded_attempt_is_in_no_nodes_baseline():
    """C11."""

    def member(name: str, reward: float, attempts: int):
        steps = [
            step(f"{name}{n}", [1], [2], node="plan", namespace=f"plan:{name}", attempt=n)
            for n in range(1, attempts + 1)
        ]
        return replace(trajectory(name, None, *steps), node_rewards={"plan": reward})

    retried = group(member("a", 1.0, 3), member("b", 0.0, 1))
    assert step_advantages(retried) == {"a": {"a3": 0.5}, "b": {"b1": -0.5}}


# -- leave-one-out -----------------------------------------------------------------------------------


@given(REWARDS)
def test_leave_one_out_measures_a_reward_against_the_mean_of_the_others(rewards: list[float]):
    """RLOO, arXiv:2402.14740, as its formula says."""
    found = group_advantages(rewards, "leave_one_out")
    if found is None:
        assert max(rewards) - min(rewards) < 1e-6
        return
    n = len(rewards)
    for i, advantage in enumerate(found):
        others = [r for j, r in enumerate(rewards) if j != i]
        assert advantage == pytest.approx(rewards[i] - sum(others) / len(others), abs=1e-9)
    centred = group_advantages(rewards, "mean")
    assert centred is not None
    assert found == pytest.approx([c * n / (n - 1) for c in centred], abs=1e-9)


def test_leave_one_out_leaves_out_every_reward_of_the_same_rollout():
    found = group_advantages([1.0, 0.0, 4.0], "leave_one_out", owners=["a", "a", "b"])
    assert found == [1.0 - 4.0, 0.0 - 4.0, 4.0 - 0.5]
    assert group_advantages([1.0, 0.0], "leave_one_out", owners=["a", "a"]) is None


# -- what a step is compared with --------------------------------------------------------------------


def agents(name: str, reward: float, *rewards: float) -> Trajectory:
    """Two agents, each a subgraph whose calls are made in a node named ``call``, then one more call."""
    where = (("researcher", 1), ("writer", 1), ("researcher", 2))
    steps = tuple(
        step(f"{name}{i}", [i], [9], node="call", namespace=f"{agent}:{name}{n}|call:{name}{i}")
        for i, (agent, n) in enumerate(where)
    )
    given_to = {s.id: r for s, r in zip(steps, rewards, strict=False)}
    return replace(trajectory(name, reward, *steps), step_rewards=given_to)


def pools_of(group: TrajectoryGroup, baseline: BaselineName) -> list[set[str]]:
    """Which steps are compared with each other: found by giving every step but one the same reward."""
    every = [s.id for t in group for s in t.steps]
    found: set[frozenset[str]] = set()
    for odd in every:
        scored = group.with_trajectories(
            [replace(t, step_rewards={s.id: float(s.id == odd) for s in t.steps}) for t in group]
        )
        advantages = step_advantages(scored, baseline_per=baseline)
        found.add(frozenset(s for steps in advantages.values() for s in steps))
    return sorted((set(p) for p in found), key=min)


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("node", [{"a0", "a2", "b0", "b2"}, {"a1", "b1"}]),
        ("agent", [{"a0", "a2", "b0", "b2"}, {"a1", "b1"}]),
        ("turn", [{"a0", "b0"}, {"a1", "b1"}, {"a2", "b2"}]),
        ("prompt", [{"a0", "b0"}, {"a1", "b1"}, {"a2", "b2"}]),
    ],
)
def test_steps_are_compared_with_those_of_the_same_kind(baseline: BaselineName, expected: list[set[str]]):
    """The calls' node is named ``call`` in both agents; the subgraph tells them apart."""
    assert pools_of(group(agents("a", 1.0), agents("b", 0.0)), baseline) == expected


def test_an_agent_is_everything_below_a_node_of_the_outermost_graph():
    def member(name: str):
        steps = [
            step(f"{name}{node}", [1], [2], node=node, namespace=f"team:{name}|{node}:{name}")
            for node in ("plan", "act")
        ]
        return trajectory(name, None, *steps)

    members = group(member("a"), member("b"))
    assert pools_of(members, "agent") == [{"aplan", "aact", "bplan", "bact"}]
    assert pools_of(members, "node") == [{"aact", "bact"}, {"aplan", "bplan"}]


def test_with_gamma_a_step_is_worth_what_came_from_it_on():
    members = group(agents("a", 0.0, 0.0, 1.0, 0.0), agents("b", 0.0, 0.0, 0.0, 0.0))
    found = step_advantages(members, baseline_per="turn", gamma=0.5)
    # Returns of a: 0.5, 1, 0. Nothing came after its second call.
    assert found == {"a": {"a0": 0.25, "a1": 0.5}, "b": {"b0": -0.25, "b1": -0.5}}


def test_with_gamma_zero_only_the_last_step_is_worth_the_rollouts_reward():
    members = group(agents("a", 1.0), agents("b", 0.0))
    assert step_advantages(members, baseline_per="turn", gamma=0.0) == {"a": {"a2": 0.5}, "b": {"b2": -0.5}}


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_rollout_is_in_no_steps_baseline(baseline: BaselineName, kind: AdvantageName):
    """C33"""
    pair = (agents("a", 1.0), agents("b", 0.0))
    extra = failed("z", step("z0", [0], [9], node="call"))
    whole = step_advantages(group(*pair, extra), kind, baseline_per=baseline)
    assert whole == step_advantages(group(*pair), kind, baseline_per=baseline)


@given(st.permutations(range(4)), st.sampled_from(BASELINES), st.sampled_from(KINDS))
def test_advantages_of_steps_do_not_depend_on_the_order_of_rollouts(
    order: list[int], baseline: BaselineName, kind: AdvantageName
):
    """C27"""
    members = [agents(name, 0.0, *rewards) for name, rewards in zip("abcd", REWARDED, strict=True)]
    straight = step_advantages(group(*members), kind, baseline_per=baseline, gamma=0.9)
    shuffled = step_advantages(group(*(members[i] for i in order)), kind, baseline_per=baseline, gamma=0.9)
    assert straight == shuffled


REWARDED = ((0.3, 0.1, 0.7), (0.2, 0.9, 0.1), (0.0, 0.1, 0.2), (1.0, 0.3, 0.1))
