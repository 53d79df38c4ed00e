from dataclasses import replace
from pathlib import Path

import pytest
from helpers.trajectories import a_step, a_trajectory

from art_core.errors import ConfigError, RewardError
from art_core.rewards import Adaptive, PerNode, PerStep, Steps, ascore_trajectories, component
from art_core.rewards.compose import Component
from art_core.rewards.reweighting import IN_PARTS, NO_SUM, Reweighted, reweighted, weights_to_turn
from art_core.store import Store
from art_core.types import Failure, RolloutStatus, Scenario, StepIdentity, Trajectory, TrajectoryGroup


def reads(metric: str) -> Component:
    return component(lambda t: t.metrics[metric], name=metric)


async def group_of(reward: Component, *measured: dict[str, float], name: str = "g") -> TrajectoryGroup:
    members = [a_trajectory(f"{name}-{i}", 1, group_id=name, metrics=m) for i, m in enumerate(measured)]
    return TrajectoryGroup(Scenario("s"), tuple(await ascore_trajectories(reward, members)), name)


MEASURED = ({"quality": 1.0, "cost": 10.0}, {"quality": 0.25, "cost": 2.0})


def only(found: Reweighted) -> TrajectoryGroup:
    (group,) = found.groups
    return group


async def test_rewards_are_what_the_same_sum_under_those_weights_would_have_given() -> None:
    quality, cost = reads("quality"), reads("cost")
    scored = await group_of(1.0 * quality - 0.01 * cost, *MEASURED)
    told = reweighted([scored], {"cost": -0.2})
    expected = await group_of(1.0 * quality - 0.2 * cost, *MEASURED)
    assert only(told).rewards == expected.rewards == pytest.approx((-1.0, -0.15))
    assert [t.metrics for t in only(told)] == [t.metrics for t in expected]
    assert (told.changed, told.as_scored, told.unknown) == (1, {}, {})
    assert scored.rewards == pytest.approx((0.9, 0.23))
    assert reweighted(told.groups, {"cost": -0.2}) == Reweighted(told.groups, 0, {}, {})
    assert only(reweighted(told.groups, {"cost": -0.01})).rewards == scored.rewards


async def test_a_gate_is_weighed_as_a_whole_and_its_parts_are_not() -> None:
    gated = (0.5 * reads("quality") + 0.5 * reads("cost")).named("both").gated(reads("form"))
    measured = [{**m, "form": form} for m, form in zip(MEASURED, (1.0, 0.0), strict=True)]
    scored = await group_of(gated - 0.1 * Steps(), *measured)
    assert scored.rewards == pytest.approx((5.4, -0.1))
    assert only(reweighted([scored], {"both": 2.0})).rewards == pytest.approx((10.9, -0.1))
    told = reweighted([scored], {"both/quality": 2.0, "both/form": 1.0, "quality": 1.0})
    assert only(told) == scored
    assert told.unknown["both/quality"] == "it is a part of 'both', which is weighed as a whole"
    assert told.unknown["both/form"] == told.unknown["both/quality"]
    assert told.unknown["quality"].endswith("those with a weight are 'both', 'steps'")


async def test_adaptive_weights_are_turned_in_standard_deviations() -> None:
    def adaptive(cost: float) -> Adaptive:
        return Adaptive(1.0 * reads("quality") + cost * reads("cost"), warmup=2)

    async def played(reward: Adaptive) -> TrajectoryGroup:
        for i in range(4):
            await group_of(reward, {"quality": 0.1 * i, "cost": 30.0 * i}, name=f"before-{i}")
        return await group_of(reward, *MEASURED)

    scored, expected = await played(adaptive(-0.5)), await played(adaptive(-2.0))
    assert scored.rewards != pytest.approx(expected.rewards)
    turned = only(reweighted([scored], {"cost": -2.0}))
    assert turned.rewards == pytest.approx(expected.rewards, rel=1e-12)
    for member, other in zip(turned, expected, strict=True):
        assert member.metrics == pytest.approx(other.metrics)


async def test_named_parts_that_make_the_reward_count_once_each() -> None:
    parts = component(lambda t: {"right": t.metrics["quality"], "long": -t.metrics["cost"]}, name="whole")
    members = [a_trajectory(f"t{i}", 1, metrics=m) for i, m in enumerate(MEASURED)]

    async def as_parts(trajectory: Trajectory) -> dict[str, float]:
        return {"right": trajectory.metrics["quality"], "long": -trajectory.metrics["cost"]}

    scored = TrajectoryGroup(Scenario("s"), tuple(await ascore_trajectories(as_parts, members)))
    assert only(reweighted([scored], {"long": 0.5})).rewards == (1.0 - 5.0, 0.25 - 1.0)
    nested = await group_of(parts, *MEASURED)
    assert only(reweighted([nested], {"whole": 2.0})).rewards == (-18.0, -3.5)


@pytest.mark.parametrize("kind", ["number", "person", "steps"])
async def test_a_group_with_a_member_that_is_no_sum_stays_as_scored_and_is_told_of(kind: str) -> None:
    reward = reads("quality") - 0.1 * reads("cost")
    scored = await group_of(reward, *MEASURED)
    other = await group_of(reward, *MEASURED, name="h")
    odd = scored.trajectories[0]
    if kind == "number":
        odd = odd.with_reward(0.5, components={})
    elif kind == "person":
        odd = odd.with_reward(0.5)  # beside the components of what it was worth before
    else:
        odd = replace(odd, step_rewards={odd.steps[0].id: 0.5})
    mixed = scored.with_trajectories([odd, scored.trajectories[1]])
    told = reweighted([mixed, other], {"cost": -1.0})
    assert told.groups[0] == mixed
    assert told.groups[1].rewards == (-9.0, -1.75)
    assert told.as_scored == {IN_PARTS if kind == "steps" else NO_SUM: 1}
    assert told.unknown == {}


@pytest.mark.parametrize("events", [False, True])
async def test_rewards_of_steps_and_nodes_are_reweighted_too_also_from_the_record(
    events: bool, tmp_path: Path
) -> None:
    asked = component(lambda t: float(len(t.steps[0].messages[0]["content"])), name="asked")
    place = component(lambda t: float(t.steps[0].id.endswith("1")), name="place")

    def reward(cost: float, by_step: float, by_node: float) -> Component:
        total = (
            reads("quality")
            + cost * reads("cost")
            + by_step * PerStep(place)
            + by_node * PerNode(asked, "writer")
        )
        return total.as_events() if events else total

    def member(name: str, measured: dict[str, float]) -> Trajectory:
        nodes = ("player", "player", "writer", "writer")
        steps = [a_step(name, n, identity=StepIdentity(node=node)) for n, node in enumerate(nodes)]
        return replace(a_trajectory(name, metrics=measured), steps=tuple(steps))

    async def scored(made: Component) -> TrajectoryGroup:
        members = [member(f"m{i}", measured) for i, measured in enumerate(MEASURED)]
        return TrajectoryGroup(Scenario("s"), tuple(await ascore_trajectories(made, members)), "g")

    first, expected = await scored(reward(-0.1, 0.5, 0.25)), await scored(reward(-0.1, -2.0, 1.0))
    with Store.open("p", tmp_path) as store:
        store.save_group(first)
        kept = store.group("g")
    for given in (first, kept):
        told = reweighted([given], {"place": -2.0, "asked": 1.0})
        assert told.as_scored == {}
        for turned, other in zip(only(told), expected, strict=True):
            assert turned.reward == pytest.approx(other.reward)
            assert turned.step_rewards == pytest.approx(other.step_rewards)
            assert turned.node_rewards == pytest.approx(other.node_rewards)
            assert turned.step_rewards != given.trajectories[0].step_rewards
    by_hand = replace(first.trajectories[0], node_rewards={"writer": 1.0})
    assert reweighted([first.with_trajectories([by_hand])], {"place": 0.0}).as_scored == {IN_PARTS: 1}


async def test_rewards_that_would_not_be_finite_are_refused_by_name_and_never_trained() -> None:
    scored = await group_of(reads("quality") - 0.5 * reads("cost"), {"quality": 1.0, "cost": 1e300})
    with pytest.raises(RewardError, match=r"trajectory g-0: the reward is -?(inf|nan)"):
        reweighted([scored], {"cost": -1e300})
    (huge,) = scored.trajectories
    huge = replace(huge, components={"quality": 1e308, "cost": 1e308}, metrics={}, reward=1e308)
    assert reweighted([scored.with_trajectories([huge])], {"cost": 2.0}).as_scored == {NO_SUM: 1}
    assert weights_to_turn(huge) == {}
    for wrong in (float("nan"), "1", True, None):
        with pytest.raises(ConfigError, match=f"weight of component 'cost' is {wrong!r}"):
            reweighted([scored], {"cost": wrong})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="takes groups, got Trajectory"):
        reweighted(scored, {"cost": 1.0})  # type: ignore[arg-type]


async def test_failed_and_unscored_members_are_in_nobodys_way() -> None:
    scored = await group_of(reads("quality") - 0.1 * reads("cost"), *MEASURED)
    failed = replace(
        scored.trajectories[0], reward=None, status=RolloutStatus.FAILED, failure=Failure("timeout", "slow")
    )
    blank = replace(scored.trajectories[0], reward=None, components={})
    told = reweighted([scored.with_trajectories([*scored, failed, blank])], {"cost": -1.0})
    assert only(told).rewards == (-9.0, -1.75)
    assert only(told).trajectories[2:] == (failed, blank)
    assert told.as_scored == {}


async def test_what_was_scored_again_by_another_sum_has_that_ones_weights_alone() -> None:
    adaptive = Adaptive(reads("quality") - 0.5 * reads("cost"), warmup=2)
    for i in range(4):
        await group_of(adaptive, {"quality": 0.1 * i, "cost": 30.0 * i}, name=f"before-{i}")
    first = await group_of(adaptive, *MEASURED)
    assert "scale/cost" in first.trajectories[0].metrics
    again = await ascore_trajectories(1.0 * reads("cost"), first)
    assert {name for name in again[0].metrics if "/" in name} == {"weight/cost"}
    assert only(reweighted([first.with_trajectories(again)], {"cost": 2.0})).rewards == (20.0, 4.0)
