from dataclasses import replace

import pytest
from helpers.training import group, step, trajectory

from art_core.backends.feed import MISPLACED, UNUSED, Feed
from art_core.config import ReplayConfig, TrainConfig
from art_core.errors import NothingToTrainError
from art_core.selection import OTHER_POLICY, Nodes, choose, own_steps
from art_core.types import PolicyVersion, Step, TrajectoryGroup

TRAIN = TrainConfig(replay=ReplayConfig(groups=1))


def weighed(name: str, *measured: tuple[float, float]) -> TrajectoryGroup:
    """A group whose rewards are quality - 0.1 * length."""
    members = [
        replace(
            trajectory(f"{name}-{i}", quality - 0.1 * length, step(f"{name}-{i}", [5], [6, 2], version=1)),
            components={"quality": quality, "length": length},
            metrics={"weight/quality": 1.0, "weight/length": -0.1},
        )
        for i, (quality, length) in enumerate(measured)
    ]
    return replace(group(*members, scenario=name), id=name)


FIRST, SECOND = weighed("first", (0.0, 0.0), (1.0, 5.0)), weighed("second", (0.0, 2.0), (1.0, 2.0))


def test_fresh_and_replayed_groups_are_trained_under_the_weights_in_force_and_kept_as_scored():
    feed = Feed("p")
    served = feed.serve([[FIRST]], 1, TRAIN)
    assert served.batches == ((FIRST,),)
    assert "groups_reweighted" not in served.metrics
    assert not served.rescaled
    feed.keep([[FIRST]], 1, TRAIN)
    served = feed.serve([[SECOND]], 2, TRAIN, {"length": -0.5})
    ((fresh, again),) = served.batches
    assert (fresh.rewards, again.rewards) == ((-1.0, 0.0), (0.0, -1.5))
    assert served.rescaled
    assert served.metrics["groups_reweighted"] == 2
    assert served.metrics["reward_mean"] == -0.5  # of what was collected
    assert served.metrics["reward_mean_scored"] == pytest.approx(0.3)
    assert served.metrics["reward_group_std"] == 0.5
    assert [g.rewards for g in served.collected] == [(-1.0, 0.0)]
    assert served.events == ()
    feed.keep([[SECOND]], 2, TRAIN)
    assert not feed.serve([[SECOND]], 3, TRAIN, {"length": -0.5}).rescaled
    served = feed.serve([[weighed("third", (0.0, 0.0), (1.0, 0.0))]], 3, TRAIN)
    assert served.rescaled
    assert served.batches[0][1].rewards in (FIRST.rewards, SECOND.rewards)
    assert "reward_mean_scored" not in served.metrics


def test_what_cannot_be_reweighted_is_told_of_once_until_weights_are_turned_again():
    plain = group(trajectory("a", 0.0, step("a", [5], [6])), trajectory("b", 1.0, step("b", [5], [7])))
    feed = Feed("p")
    batches = [[FIRST, plain]]
    served = feed.serve(batches, 1, TRAIN, {"length": -0.5, "speed": 1.0})
    (event,) = served.events
    assert event.kind == UNUSED
    assert "'speed' is not used: no rollout has such a component" in event.message
    assert "1 of 2 groups are trained as they were scored" in event.message
    assert "model.turn(reward_weights={name: None})" in event.message
    assert served.batches[0][1].rewards == (0.0, 1.0)
    assert served.metrics["groups_reweighted"] == 1
    assert feed.serve(batches, 2, TRAIN, {"length": -0.5, "speed": 1.0}).events == ()
    (again,) = feed.serve(batches, 3, TRAIN, {"length": -0.25}).events
    assert "speed" not in again.message
    assert feed.serve(batches, 4, TRAIN).events == ()


def test_a_component_of_some_of_a_calls_groups_is_known_to_the_call():
    other = group(trajectory("a", 0.5, step("a", [5], [6])), scenario="other")
    other = other.with_trajectories(
        [replace(t, components={"speed": 0.5}, metrics={"weight/speed": 1.0}) for t in other]
    )
    served = Feed("p").serve([[FIRST], [other]], 1, TRAIN, {"length": -0.5, "speed": 2.0})
    assert served.events == ()
    assert [[g.rewards for g in batch] for batch in served.batches] == [[(0.0, -1.5)], [(1.0,)]]


def test_a_feed_that_was_restored_goes_on_under_the_weights_that_it_had():
    feed, groups = Feed("p", seed=3), {g.id: g for g in (FIRST, SECOND)}
    feed.serve([[FIRST], [SECOND]], 1, TRAIN, {"length": 0.25})
    feed.keep([[FIRST], [SECOND]], 1, TRAIN)
    other = Feed("p", seed=3)
    other.restore(feed.state(), groups.__getitem__, TRAIN, feed.weights)
    fresh = [[weighed("third", (0.0, 0.0), (1.0, 0.0))]]
    for weights in ({"length": 0.25}, {"length": -1.0}):
        assert other.serve(fresh, 2, TRAIN, weights) == feed.serve(fresh, 2, TRAIN, weights)
    assert other.weights == {"length": -1.0}


def test_steps_of_other_policies_are_neither_trained_nor_stale_fresh_or_replayed():
    def of(policy: str, name: str, version: int) -> Step:
        return replace(step(name, [5], [6], version=version), policy=PolicyVersion(policy, version))

    def mixed(name: str) -> TrajectoryGroup:
        members = [
            trajectory(f"{name}-{i}", float(i), of("m", f"{name}-{i}-own", 3), of("judge", f"{name}-{i}", 0))
            for i in range(2)
        ]
        return replace(group(*members, scenario=name), id=name)

    feed = Feed("m")
    served = feed.serve([[mixed("first")]], 3, TRAIN.model_copy(update={"max_staleness": 0}))
    assert served.metrics["staleness_max"] == 0
    assert not served.left_out
    for found in served.batches[0][0]:
        chosen = choose(found)
        assert [s.id for s in chosen.steps] == [f"{found.id}-own"]
        assert chosen.left_out == {OTHER_POLICY: 1}
    feed.keep([[mixed("first")]], 3, TRAIN)
    feed.restore(feed.state(), lambda _: mixed("first"), TRAIN, {})
    again = feed.serve([[mixed("second")]], 3, TRAIN).batches[0][1]
    assert [len(choose(t).steps) for t in again] == [1, 1]
    ancestors = replace(group(trajectory("a", 1.0, of("parent", "a", 1)), scenario="old"), id="old")
    assert own_steps([ancestors], "m") == [ancestors]
    silent = replace(group(trajectory("b", 1.0, of("judge", "b", 1)), scenario="new"), id="new")
    assert [len(choose(g.trajectories[0]).steps) for g in own_steps([mixed("x"), silent], "m")] == [1, 0]


def test_a_step_that_is_not_to_be_trained_makes_no_rollout_stale():
    frozen = step("judge", [5], [6], node="judge", version=0)
    rollouts = group(
        *(trajectory(f"{i}", float(i), step(f"{i}", [5], [6], version=3), frozen) for i in range(2))
    )
    config = TRAIN.model_copy(update={"max_staleness": 1})
    served = Feed("m").serve([[rollouts]], 3, config, train=~Nodes("judge"))
    assert served.metrics["staleness_max"] == 0
    assert served.batches[0][0].rewards == (0.0, 1.0)
    with pytest.raises(NothingToTrainError, match="max_staleness=1"):
        Feed("m").serve([[rollouts]], 3, config)


def test_rewards_of_nodes_that_do_not_exist_are_told_of_once():
    def rewarded(**by_node: float) -> TrajectoryGroup:
        made = step("a", [5], [6], node="plan")
        return group(*(replace(trajectory(f"{i}", float(i), made), node_rewards=by_node) for i in range(2)))

    feed = Feed("m")
    (event,) = feed.serve([[rewarded(plan=1.0, wirte=0.5)]], 0, TRAIN).events
    assert event.kind == MISPLACED
    assert "'wirte'" in event.message
    assert "made in 'plan'" in event.message
    assert feed.serve([[rewarded(plan=1.0, wirte=0.5)]], 0, TRAIN).events == ()
    assert Feed("m").serve([[rewarded(plan=1.0)]], 0, TRAIN).events == ()
