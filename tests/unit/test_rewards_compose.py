"""Components: what sums record, what gates stop, and what a broken one leaves behind."""

import asyncio
import math
import pickle
import sys
import threading

import pytest
from helpers.trajectories import a_trajectory
from hypothesis import given
from hypothesis import strategies as st

from art_core.errors import ConfigError, RewardError
from art_core.gather import agather
from art_core.recording import current_rollout, new_id
from art_core.rewards import (
    Adaptive,
    Citation,
    Component,
    Cost,
    ExactMatch,
    Format,
    FuzzyMatch,
    Length,
    Steps,
    ToolArguments,
    ToolChoice,
    UserFeedback,
    ValidJSON,
    ascore_trajectories,
    component,
    score_trajectories,
)
from art_core.scoring import Reward
from art_core.types import Failure, PolicyVersion, RolloutStatus, Scenario, Step, Trajectory, TrajectoryGroup


def constant(value: float, name: str) -> Component:
    return component(lambda trajectory: value, name=name)


async def scored(reward: Component, trajectory: Trajectory | None = None, output: object = None) -> Reward:
    found = reward(trajectory or a_trajectory("t"), output)
    return await found if not isinstance(found, Reward) else found


async def answering(scenario: Scenario) -> str:
    rollout = current_rollout()
    assert rollout is not None
    step = Step(
        id=new_id("s"),
        rollout_id=rollout.id,
        messages=({"role": "user", "content": scenario.id},),
        response={"role": "assistant", "content": "Paris"},
        model="agent@0",
        policy=PolicyVersion("agent", 0),
        started_at=0.0,
        duration=0.0,
    )
    rollout.record(step)
    return "Paris"


# -- sums --------------------------------------------------------------------------------------------


async def test_a_sum_records_every_raw_value_and_weight() -> None:
    total = 0.6 * constant(0.5, "quality") + 0.3 * constant(1, "tools") - 0.01 * Steps()
    found = await scored(total)
    assert found.total == pytest.approx(0.6 * 0.5 + 0.3 - 0.01 * 2)
    assert found.components == {"quality": 0.5, "tools": 1.0, "steps": 2.0}
    assert found.metrics == {"weight/quality": 0.6, "weight/tools": 0.3, "weight/steps": -0.01}


@given(st.lists(st.tuples(*[st.floats(-1e3, 1e3)] * 2), min_size=1, max_size=5), st.floats(-10, 10))
def test_the_total_is_the_sum_of_the_recorded_values_times_the_recorded_weights(
    terms: list[tuple[float, float]], factor: float
) -> None:
    total = factor * sum(weight * constant(value, f"c{i}") for i, (value, weight) in enumerate(terms))
    found = asyncio.run(scored(total))
    recorded = math.fsum(v * found.metrics[f"weight/{name}"] for name, v in found.components.items())
    assert found.total == pytest.approx(recorded, abs=1e-6)
    assert found.total == pytest.approx(factor * sum(v * w for v, w in terms), abs=1e-6)


async def test_plain_functions_join_a_sum_on_either_side_by_their_own_names() -> None:
    def quality(trajectory: Trajectory) -> float:
        return 0.25

    async def style(trajectory: Trajectory, output: object) -> float:
        return float(output == "x")

    for total in (quality + Steps() / 2 - style, -component(style) + (quality + 0.5 * Steps())):
        found = await scored(total, output="x")
        assert found.total == pytest.approx(0.25 + 1.0 - 1.0)
        assert found.components == {"quality": 0.25, "steps": 2.0, "style": 1.0}


async def test_named_parts_of_a_function_are_kept_under_its_name_with_its_steps_and_nodes() -> None:
    @component(name="game")
    def play(trajectory: Trajectory) -> Reward:
        return Reward(3.0, {"won": 1.0, "style": 2.0}, {"player": 4.0}, {"s-t-0": 5.0}, {"moves": 7})

    found = await scored(0.5 * play + 2 * constant(1, "other"))
    assert found.components == {"game": 3.0, "game/won": 1.0, "game/style": 2.0, "other": 1.0}
    assert found.by_node == {"player": 0.5 * 4 + 2}
    assert found.by_step == {"s-t-0": 0.5 * 5 + 2}
    assert found.metrics["game/moves"] == 7
    assert found.total == 3.5


async def test_a_sum_with_a_name_is_one_component_with_parts() -> None:
    quality = (constant(1, "a") + constant(3, "b")).named("quality") / 4
    found = await scored(quality - 0.5 * constant(1, "c"))
    assert found.total == 0.5
    assert found.components == {"quality": 4.0, "quality/a": 1.0, "quality/b": 3.0, "c": 1.0}
    assert found.metrics["weight/quality"] == 0.25


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Steps() + Steps(), "two components are named 'steps'"),
        (lambda: math.nan * Steps(), "finite"),
        (lambda: math.inf * (Steps() + Length()), "finite"),
        (lambda: Steps() / 0, "zero"),
        (lambda: component(lambda t: 1.0), "lambda has no name"),
        (lambda: Steps().within(0), "timeout=0"),
        (lambda: (Steps() + Length()).gated(ExactMatch()), "needs a name"),
        (lambda: Steps().gated(Steps()), "both named 'steps'"),
        (lambda: component(lambda: 1.0, name="x"), "must take"),
        *(
            (
                lambda kind=kind: kind(["Paris"]),
                r"expected=\['Paris'\]: give a key of the scenarios' metadata",
            )
            for kind in (ExactMatch, FuzzyMatch, Citation, ToolChoice, ToolArguments)
        ),
        (lambda: score_trajectories(ExactMatch, []), r"ExactMatch is a class; make one: ExactMatch\("),
        (lambda: score_trajectories([Steps()], []), "the reward is list, expected a function"),  # type: ignore[arg-type]
        (lambda: Cost({"gpt": (1, 2)}), r"the price \(1, 2\): expected prices as"),  # type: ignore[dict-item]
        (lambda: Cost(3.0), r"the price 3.0: expected prices as"),  # type: ignore[arg-type]
        (lambda: Format(None), "pattern None cannot be compiled"),  # type: ignore[arg-type]
        (lambda: ValidJSON("{}"), "schema='{}': expected a JSON Schema as a mapping"),  # type: ignore[arg-type]
        (lambda: UserFeedback([]), "labels are list, expected labels_of"),  # type: ignore[arg-type]
        (lambda: UserFeedback({}, otherwise=math.nan), "otherwise: the reward is nan"),
    ],
)
def test_what_cannot_be_composed_is_refused_with_a_reason(make, says: str) -> None:
    with pytest.raises((ConfigError, RewardError), match=says):
        make()


def test_other_arithmetic_is_a_type_error() -> None:
    for make in (lambda: Steps() + 1, lambda: 1 - Steps(), lambda: Steps() * "2", lambda: True * Steps()):
        with pytest.raises(TypeError):
            make()


async def test_async_components_run_at_the_same_time_and_sync_ones_in_threads() -> None:
    both, here = asyncio.Barrier(2), threading.get_ident()

    async def meets(trajectory: Trajectory) -> float:
        await both.wait()  # would wait for ever for a component that is asked later
        return 1.0

    def elsewhere(trajectory: Trajectory) -> float:
        return float(threading.get_ident() != here)

    total = component(meets, name="a") + component(meets, name="b") + elsewhere
    assert (await asyncio.wait_for(scored(total), 20)).total == 3.0


# -- gates -------------------------------------------------------------------------------------------


async def test_a_closed_gate_is_worth_what_was_agreed_and_asks_nothing() -> None:
    asked: list[str] = []

    @component
    async def judge(trajectory: Trajectory) -> float:
        asked.append(trajectory.id)
        return 0.9

    for value, counts in ((1.0, 0.9), (0.0, -0.5)):
        total = 2 * judge.gated(constant(value, "format"), otherwise=-0.5) - constant(0.1, "fee")
        found = await scored(total)
        assert found.total == pytest.approx(2 * counts - 0.1)
        assert found.components == pytest.approx({"judge": counts, "judge/format": value, "fee": 0.1})
        assert found.metrics["judge/gate"] == value
    assert asked == ["t"]


# -- failures ----------------------------------------------------------------------------------------


async def hangs(trajectory: Trajectory) -> float:
    await asyncio.Event().wait()
    return 0.0


def blocks(trajectory: Trajectory) -> float:
    threading.Event().wait()
    return 0.0


async def cancels_itself(trajectory: Trajectory) -> float:
    raise asyncio.CancelledError


def divides(trajectory: Trajectory) -> float:
    return 1 / 0


def leaves(trajectory: Trajectory) -> float:
    sys.exit(3)


async def leaves_later(trajectory: Trajectory) -> float:
    await asyncio.sleep(0)
    sys.exit("no such option")


BROKEN = [
    (component(divides), "'divides' .*division by zero"),
    (component(lambda t: {}["won"], name="looks_up"), r"'looks_up' .*KeyError\('won'\)"),
    (component(hangs).within(0.05), "'hangs' .*within 0.05 s"),
    (component(blocks, timeout=0.05), "'blocks' .*within 0.05 s"),
    (component(cancels_itself), "'cancels_itself' .*cancelled"),
    (component(leaves), r"'leaves' .*it called sys.exit\(3\)"),
    (component(leaves_later), r"'leaves_later' .*it called sys.exit\('no such option'\)"),
    (constant(math.nan, "odd"), "'odd' .*nan"),
    (component(lambda t: "a" in "abc", name="truth"), r"'truth' .*got bool True; return float\(True\)"),
    (component(lambda t: Steps(), name="uncalled"), "'uncalled' .*got Steps$"),
    (component(lambda t: "1", name="text"), "'text' .*number"),
    (constant(1, "fine").gated(component(divides)), "'divides' .*division"),
]


@pytest.mark.parametrize(("broken", "says"), BROKEN, ids=[b.name for b, _ in BROKEN[:-1]] + ["gate"])
async def test_a_broken_component_leaves_the_rollout_unscored_under_its_name(
    broken: Component, says: str
) -> None:
    """C32, C33."""
    total = 0.5 * constant(1, "good") + broken
    [group] = await agather(answering, [Scenario("a")], group_size=2, reward=total, min_group_size=0)
    for member in group:
        assert member.failed
        assert member.reward is None
        assert member.failure is not None
        assert member.failure.cause == "reward"
        with pytest.raises(RewardError, match=says):
            raise RewardError(member.failure.message)


async def test_the_first_failure_cancels_components_that_still_run() -> None:
    cancelled = asyncio.Event()

    @component
    async def slow(trajectory: Trajectory) -> float:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 0.0

    with pytest.raises(RewardError, match="'divides'") as raised:
        await scored(slow + divides)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    await asyncio.wait_for(cancelled.wait(), 20)


# -- in gather, in batches ---------------------------------------------------------------------------


async def test_a_sum_is_a_reward_of_gather_and_its_parts_are_on_the_trajectory() -> None:
    scenarios = [Scenario("a", metadata={"answer": "paris"}), Scenario("b", metadata={"answer": "Rome"})]
    groups = await agather(answering, scenarios, group_size=2, reward=ExactMatch() - 0.25 * Steps())
    assert [g.rewards for g in groups] == [(0.75, 0.75), (-0.25, -0.25)]
    assert groups[0].trajectories[0].components == {"exact_match": 1.0, "steps": 1.0}
    assert groups[0].trajectories[0].metrics == {"weight/exact_match": 1.0, "weight/steps": -0.25}


def test_a_single_component_is_recorded_too() -> None:
    [found] = score_trajectories(Steps(), [a_trajectory("t", steps=3)])
    assert (found.reward, found.components) == (3.0, {"steps": 3.0})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (a_trajectory("t"), "one trajectory was given"),
        (
            [TrajectoryGroup(Scenario("a"), (a_trajectory("t"),), "g")],
            r"groups were given .* \[t for group in",
        ),
        (["t"], "str was given"),
    ],
)
def test_a_batch_is_of_trajectories_and_nothing_else(given, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        score_trajectories(Steps(), given)


async def test_a_batch_keeps_order_leaves_failures_alone_and_says_why_one_is_unscored() -> None:
    """C33."""
    failed = a_trajectory(
        "bad", status=RolloutStatus.FAILED, reward=None, failure=Failure("exception", "broke")
    )

    def picky(trajectory: Trajectory, output: object) -> float:
        return {"a": 1.0, "b": math.nan, "c": 3.0}[trajectory.id] + float(output == "out")

    given = [a_trajectory("a"), failed, a_trajectory("b"), a_trajectory("c", metadata={"output": "out"})]
    found = await ascore_trajectories(picky, given, concurrency=2)
    assert [t.id for t in found] == ["a", "bad", "b", "c"]
    assert [t.reward for t in found] == [1.0, None, None, 4.0]
    assert found[1] is failed
    assert found[2].failure is not None
    assert "picky" in found[2].failure.message
    twice = await ascore_trajectories(lambda t: 2.0, given[:1], outputs=["x"])
    assert (twice[0].reward, twice[0].components) == (2.0, {})
    with pytest.raises(RewardError, match="must take"):
        await ascore_trajectories(lambda: 2.0, given)
    with pytest.raises(ConfigError, match="1 outputs for 4"):
        await ascore_trajectories(picky, given, outputs=["x"])


def test_sums_of_ready_made_components_can_be_sent_to_other_processes() -> None:
    total = 0.5 * ExactMatch().gated(Length(unit="characters"), least=2) - 0.1 * Steps().within(5)
    again = pickle.loads(pickle.dumps(total))
    assert again == total
    trajectory = a_trajectory("t", scenario=Scenario("a", {"answer": "Rome"}))
    assert asyncio.run(scored(again, trajectory, "Rome")).total == pytest.approx(0.3)


# -- adaptive weights --------------------------------------------------------------------------------


def of(group: str | None, name: str, **metrics: float) -> Trajectory:
    return a_trajectory(name, group_id=group, metrics=metrics)


def reads(metric: str) -> Component:
    return component(lambda t: t.metrics[metric], name=metric)


async def test_adaptive_weights_divide_by_the_running_spread() -> None:
    adaptive = Adaptive(0.5 * reads("small") - 0.5 * reads("large"), warmup=4, window=1000)
    for i in range(100):
        await scored(adaptive, of(None, f"t{i}", small=0.001 * (-1) ** i, large=1000.0 * (-1) ** i))
    found = await scored(adaptive, of(None, "last", small=0.001, large=0.0))
    assert found.metrics == pytest.approx(
        {"weight/small": 500.0, "weight/large": -0.0005, "scale/small": 0.001, "scale/large": 1000.0},
        rel=1e-6,
    )
    assert found.total == pytest.approx(0.5, rel=1e-6)
    assert found.components == {"small": 0.001, "large": 0.0}
    again = Adaptive(adaptive.total, warmup=4, window=1000, known=adaptive.spreads)
    resumed = await scored(again, of(None, "last", small=0.001, large=0.0))
    assert resumed.total == pytest.approx(0.5, rel=1e-2)


async def test_equal_members_of_a_group_get_equal_rewards_while_the_spread_moves() -> None:
    adaptive = Adaptive(1.0 * reads("x"), warmup=2, window=8)
    for i in range(4):
        await scored(adaptive, of("g0", f"t{i}", x=float(i)))
    first = await scored(adaptive, of("g1", "a", x=1.0))
    for i in range(4):
        await scored(adaptive, of("g2", f"u{i}", x=100.0 * i))
    assert (await scored(adaptive, of("g1", "b", x=1.0))).total == first.total
    assert (await scored(adaptive, of("g3", "c", x=1.0))).total < first.total / 10


async def test_a_component_that_never_varied_is_not_scaled() -> None:
    adaptive = Adaptive(2 * reads("x"), warmup=2)
    for i in range(5):
        found = await scored(adaptive, of(None, f"t{i}", x=0.1))
    assert found.metrics == {"weight/x": 2.0}


def test_adaptive_weights_refuse_to_be_sent_to_other_processes() -> None:
    with pytest.raises(ConfigError, match="without workers"):
        pickle.dumps(Adaptive(1.0 * Steps()))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30))
def test_the_running_spread_of_few_values_is_their_standard_deviation(values: list[float]) -> None:
    from statistics import fmean, pstdev

    from art_core.rewards.adaptive import RunningSpread

    spread = RunningSpread()
    for value in values:
        spread = spread.seen(value, 1000)
    assert spread.mean == pytest.approx(fmean(values), abs=1e-6)
    assert spread.deviation == pytest.approx(pstdev(values), abs=1e-3)
