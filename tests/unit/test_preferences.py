"""Bradley and Terry's strengths, and the rewards that people's choices make."""

import math
import random
from dataclasses import replace

import pytest
from helpers.trajectories import a_trajectory
from hypothesis import given
from hypothesis import strategies as st

from art_core.errors import RewardError
from art_core.rewards.labels import Preference
from art_core.rewards.preferences import PRIOR, connected, preference_rewards, strengths
from art_core.types import Failure, RolloutStatus, Scenario, TrajectoryGroup


def group(*names: str) -> TrajectoryGroup:
    return TrajectoryGroup(Scenario("s"), tuple(a_trajectory(name, 1, reward=None) for name in names), "g")


def chosen(text: str) -> list[Preference]:
    """``a>b`` and ``a=b``, separated by blanks."""
    return [Preference(part[0], part[2], tie=part[1] == "=") for part in text.split()]


def penalised(found: dict[str, float], choices: list[Preference]) -> float:
    """The log-likelihood that the strengths should maximise."""

    def win(a: float, b: float) -> float:
        return -math.log1p(math.exp(b - a))

    total = PRIOR * sum(win(s, 0.0) + win(0.0, s) for s in found.values())
    for p in choices:
        a, b = found[p.better], found[p.worse]
        total += 0.5 * (win(a, b) + win(b, a)) if p.tie else win(a, b)
    return total


names = st.sampled_from("abcde")
choices = st.lists(
    st.builds(Preference, names, names, st.booleans()).filter(lambda p: p.better != p.worse),
    min_size=1,
    max_size=25,
)


@given(choices)
def test_strengths_are_where_the_penalised_likelihood_is_highest(made: list[Preference]):
    found = strengths(made)
    best = penalised(found, made)
    for name in found:
        for step in (-1e-3, 1e-3):
            assert penalised({**found, name: found[name] + step}, made) <= best + 1e-12


@given(choices, st.randoms())
def test_strengths_are_finite_and_depend_on_no_order(made: list[Preference], rng: random.Random):
    found = strengths(made)
    assert all(math.isfinite(s) for s in found.values())
    mixed = [Preference(p.worse, p.better, True) if p.tie else p for p in made]
    rng.shuffle(mixed)
    again = strengths(mixed)
    assert again.keys() == found.keys()
    assert all(math.isclose(again[name], s, abs_tol=1e-7) for name, s in found.items())


def test_two_members_have_the_strengths_that_can_be_worked_out_by_hand():
    # By symmetry s_b = -s_a, and the score equation is 1 - p(2s) = PRIOR * (2 p(s) - 1) with p the sigmoid.
    found = strengths(chosen("a>b"))
    s = found["a"]
    assert found["b"] == pytest.approx(-s)

    def p(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    assert 1 - p(2 * s) == pytest.approx(PRIOR * (2 * p(s) - 1))


def test_known_strengths_are_recovered_from_many_choices():
    rng = random.Random(4)
    truth = {"a": 1.5, "b": 0.5, "c": 0.0, "d": -0.7, "e": -1.3}
    made: list[Preference] = []
    for _ in range(4000):
        i, j = rng.sample(list(truth), 2)
        wins = rng.random() < 1 / (1 + math.exp(truth[j] - truth[i]))
        made.append(Preference(i, j) if wins else Preference(j, i))
    found = strengths(made)
    middle = sum(found.values()) / 5
    assert all(found[name] - middle == pytest.approx(s, abs=0.15) for name, s in truth.items())


def test_more_choices_say_the_same_more_surely_and_ties_say_nothing():
    once, often = (preference_rewards(group("a", "b"), chosen("a>b") * n).rewards for n in (1, 20))
    assert 0.5 < once["a"] < often["a"] < 1
    assert once["a"] + once["b"] == pytest.approx(1)
    assert preference_rewards(group("a", "b"), chosen("a=b")).rewards == {"a": 0.5, "b": 0.5}


def test_a_cycle_of_choices_makes_equals():
    rewards = preference_rewards(group("a", "b", "c"), chosen("a>b b>c c>a")).rewards
    assert all(value == pytest.approx(0.5) for value in rewards.values())


def test_only_who_was_compared_has_a_reward_and_others_say_why():
    failed = replace(
        a_trajectory("x", 1, reward=None), status=RolloutStatus.FAILED, failure=Failure("timeout", "t")
    )
    members = group("a", "b", "c", "d", "e", "f")
    members = members.with_trajectories([*members, failed])
    found = preference_rewards(members, chosen("a>b b>c d>e x>a a>q a>a"))
    assert set(found.rewards) == {"a", "b", "c"}
    assert found.rewards["a"] > found.rewards["b"] > found.rewards["c"]
    assert found.choices == 2
    assert found.apart == (frozenset("de"),)
    assert found.left_out == {
        "d": "it was compared with others, but by no chain of choices with the members that have rewards",
        "e": "it was compared with others, but by no chain of choices with the members that have rewards",
        "f": "nobody compared it with another member",
        "x": "it failed",
    }
    applied = found.apply(members)
    assert [t.id for t in applied.scored] == ["a", "b", "c"]
    assert applied.trajectories[0].components["preferred"] == applied.trajectories[0].reward
    assert applied.trajectories[5].metadata["preferred"] == {"unscored": found.left_out["f"]}
    with pytest.raises(RewardError, match="trajectory f has no reward by preferences: nobody compared"):
        found.reward("f")
    with pytest.raises(RewardError, match="z is not of the group"):
        found.apply(group("z"))


def test_a_group_without_choices_has_no_rewards():
    found = preference_rewards(group("a", "b"), [])
    assert not found.rewards
    assert set(found.left_out) == {"a", "b"}


def test_sets_that_hang_together_are_found_whatever_the_order():
    assert connected(chosen("a>b c>d e>f b>c")) == [frozenset("abcd"), frozenset("ef")]
    assert connected(chosen("c>d a>b")) == [frozenset("cd"), frozenset("ab")]


def test_strengths_without_a_prior_are_refused():
    with pytest.raises(RewardError, match="prior=0"):
        strengths(chosen("a>b"), prior=0)
