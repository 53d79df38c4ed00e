"""Rollouts beside training, on a simulated engine and trainer."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice

import pytest
from helpers.training import group, step, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from art_core.errors import ConfigError, RolloutFailedError
from art_core.learning import IN_VAIN, Learned, alearn, learn
from art_core.selection import Nodes
from art_core.training.report import TrainReport
from art_core.types import PolicyVersion, Scenario, Trajectory, TrajectoryGroup


class Endpoint:
    def __init__(self) -> None:
        self.version = 0

    def current_version(self) -> PolicyVersion:
        return PolicyVersion("m", self.version)


class Machine:
    """An engine and a trainer that take as many turns of the event loop as they are told to."""

    def __init__(self, *, training: int = 3, rollouts: dict[str, int] | None = None) -> None:
        self.endpoint = Endpoint()
        self.training = training
        self.rollouts = rollouts or {}
        self.trained: list[list[str]] = []
        self.log: list[str] = []
        self.gathering = 0

    async def atrain(self, groups: list[TrajectoryGroup], *, train: object = None) -> TrainReport:
        names = [g.scenario.id for g in groups]
        self.log.append(f"train {' '.join(names)}")
        await turns(self.training)
        self.trained.append(names)
        self.endpoint.version += 1
        self.log.append("trained")
        return TrainReport({"updates": 1.0})

    async def gather(self, scenario: Scenario) -> list[TrajectoryGroup]:
        self.gathering += 1
        self.log.append(f"begin {scenario.id}")
        version = self.endpoint.version
        try:
            await turns(self.rollouts.get(scenario.id, 1))
        finally:
            self.gathering -= 1
        self.log.append(f"end {scenario.id}")
        return [of_version(scenario.id, version)]


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def of_version(name: str, version: int) -> TrajectoryGroup:
    sampled = replace(step(name, [5], [6]), policy=PolicyVersion("m", version))
    member: Trajectory = trajectory(name, 1.0, sampled)
    return group(member, scenario=name)


def scenarios(number: int | None = None) -> Iterator[Scenario]:
    return (Scenario(f"s{i}") for i in (count() if number is None else range(number)))


async def test_without_staleness_nothing_overlaps():
    machine = Machine()
    learned = await alearn(machine, machine.gather, scenarios(6), groups_per_step=2, staleness=0)
    assert machine.trained == [["s0", "s1"], ["s2", "s3"], ["s4", "s5"]]
    for i, what in enumerate(machine.log):
        if what.startswith("train "):
            assert machine.log[i + 1] == "trained"
    assert [s.staleness for s in learned.steps] == [(0, 0)] * 3
    assert learned.dropped == 0
    assert learned.unused == ()


async def test_with_staleness_rollouts_go_on_while_training_and_are_at_most_that_old():
    machine = Machine(training=20)
    learned = await alearn(machine, machine.gather, scenarios(), groups_per_step=2, staleness=1, steps=4)
    first, last = machine.log.index("train s0 s1"), machine.log.index("trained")
    assert "end s2" in machine.log[:last]
    assert (
        any(what.startswith(("begin", "end")) for what in machine.log[first:last])
        or "end s3" in machine.log[:first]
    )
    ages = [age for s in learned.steps for age in s.staleness]
    assert max(ages) == 1
    assert len(machine.trained) == 4
    # Two batches at most are begun and not yet trained.
    for made in range(4):
        before = machine.log[: [i for i, what in enumerate(machine.log) if what == "trained"][made]]
        assert sum(what.startswith("begin") for what in before) <= 2 * (made + 2)


async def test_a_group_that_took_too_long_is_dropped_and_counted():
    machine = Machine(training=2, rollouts={"s1": 200})
    learned = await alearn(machine, machine.gather, scenarios(40), groups_per_step=2, staleness=1)
    names = [name for batch in machine.trained for name in batch]
    assert "s1" not in names
    assert learned.dropped + len(learned.unused) + len(names) == 40
    assert learned.dropped >= 1 or "s1" in [g.scenario.id for g in learned.unused]
    assert "end s1" in machine.log


async def test_the_age_is_that_of_the_oldest_step_not_of_the_beginning():
    machine = Machine()

    async def gather(scenario: Scenario) -> list[TrajectoryGroup]:
        return [of_version(scenario.id, -3)]  # sampled by an older version than the current one

    learned = await alearn(machine, gather, scenarios(3), groups_per_step=1, staleness=2)
    assert learned.steps == ()
    machine = Machine()
    learned = await alearn(machine, gather, scenarios(3), groups_per_step=1, staleness=5)
    assert [s.staleness for s in learned.steps] == [(3,), (4,), (5,)]


async def test_steps_that_are_not_trained_make_no_group_old():
    machine = Machine()

    async def gather(scenario: Scenario) -> list[TrajectoryGroup]:
        (mine,) = of_version(scenario.id, machine.endpoint.version)
        judged = step("judge", [5], [6], node="judge", version=-9)
        simulated = replace(step("user", [5], [6]), policy=PolicyVersion("another", -9))
        return [group(replace(mine, steps=(*mine.steps, judged, simulated)), scenario=scenario.id)]

    options = {"groups_per_step": 1, "staleness": 0}
    learned = await alearn(machine, gather, scenarios(3), train=~Nodes("judge"), **options)
    assert [s.staleness for s in learned.steps] == [(0,)] * 3
    assert (await alearn(machine, gather, scenarios(3), **options)).dropped == 3


async def test_too_few_groups_for_a_last_step_are_handed_back():
    machine = Machine()
    learned = await alearn(machine, machine.gather, scenarios(5), groups_per_step=2, staleness=3)
    assert [len(batch) for batch in machine.trained] == [2, 2]
    assert [g.scenario.id for g in learned.unused] == ["s4"]


async def test_what_is_under_way_when_the_last_step_is_made_is_cancelled():
    machine = Machine(rollouts={f"s{i}": 1000 for i in range(2, 99)})
    learned = await alearn(machine, machine.gather, scenarios(), groups_per_step=1, staleness=4, steps=2)
    assert len(learned.steps) == 2
    assert machine.gathering == 0
    assert learned.steps[0].gathering > 0


async def test_a_scenario_whose_rollouts_all_failed_is_passed_over():
    machine = Machine()

    async def gather(scenario: Scenario) -> list[TrajectoryGroup]:
        return [] if scenario.id == "s1" else await machine.gather(scenario)

    await alearn(machine, gather, scenarios(5), groups_per_step=2, staleness=0)
    assert machine.trained == [["s0", "s2"], ["s3", "s4"]]

    async def none(scenario: Scenario) -> list[TrajectoryGroup]:
        return []

    with pytest.raises(RolloutFailedError, match=f"last {IN_VAIN} scenarios gave no group"):
        await alearn(machine, none, scenarios(), groups_per_step=2)


async def test_an_error_while_gathering_ends_all_but_a_step_that_has_begun():
    machine = Machine(training=30)

    async def gather(scenario: Scenario) -> list[TrajectoryGroup]:
        if scenario.id == "s3":
            await turns(5)
            raise ValueError("no such tool")
        return await machine.gather(scenario)

    with pytest.raises(ValueError, match="no such tool"):
        await alearn(machine, gather, scenarios(), groups_per_step=2, staleness=1)
    assert machine.trained == [["s0", "s1"]]
    assert machine.gathering == 0


async def test_an_error_while_training_ends_all():
    machine = Machine(rollouts={"s2": 1000})

    async def refuse(groups: list[TrajectoryGroup], *, train: object = None) -> TrainReport:
        raise ValueError("diverged")

    machine.atrain = refuse  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="diverged"):
        await alearn(machine, machine.gather, scenarios(), groups_per_step=2, staleness=1)
    assert machine.gathering == 0


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=25),
    training=st.integers(0, 12),
    per_step=st.integers(1, 4),
    staleness=st.integers(0, 4),
)
@settings(deadline=None, max_examples=60)
def test_whatever_takes_how_long_nothing_is_lost_and_nothing_is_too_old(
    lengths: list[int], training: int, per_step: int, staleness: int
):
    names = [f"s{i}" for i in range(len(lengths))]
    machine = Machine(training=training, rollouts=dict(zip(names, lengths, strict=True)))
    learned: Learned = learn(
        machine, machine.gather, scenarios(len(names)), groups_per_step=per_step, staleness=staleness
    )
    trained = [name for batch in machine.trained for name in batch]
    assert all(len(batch) == per_step for batch in machine.trained)
    assert len(trained) + learned.dropped + len(learned.unused) == len(names)
    assert len({*trained}) == len(trained)
    assert all(0 <= age <= staleness for s in learned.steps for age in s.staleness)
    assert learned.trainer_idle <= 1


async def test_figures_are_told_step_by_step():
    machine = Machine()
    seen = []
    learned = await alearn(
        machine, machine.gather, islice(scenarios(), 4), groups_per_step=2, on_step=seen.append
    )
    assert tuple(seen) == learned.steps
    assert [s.step for s in seen] == [1, 2]
    assert all(s.wait_seconds >= 0 and s.train_seconds > 0 for s in seen)


@pytest.mark.parametrize("wrong", [{"groups_per_step": 0}, {"staleness": -1}, {"steps": 0}])
async def test_numbers_out_of_range_are_refused(wrong: dict[str, int]):
    machine = Machine()
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        await alearn(machine, machine.gather, scenarios(1), **{"groups_per_step": 1, **wrong})
    assert machine.log == []


async def test_scenarios_that_cannot_be_read_on_end_what_was_begun():
    def broken() -> Iterator[Scenario]:
        yield Scenario("s0")
        raise OSError("the file is gone")

    machine = Machine(rollouts={"s0": 1000})
    with pytest.raises(OSError, match="the file is gone"):
        await alearn(machine, machine.gather, broken(), groups_per_step=2)
    assert all(task is asyncio.current_task() for task in asyncio.all_tasks())


async def test_a_group_that_is_whole_when_its_scenario_is_cancelled_is_handed_back():
    machine = Machine(rollouts={"s1": 1000})

    async def gather(scenario: Scenario) -> list[TrajectoryGroup]:
        try:
            return await machine.gather(scenario)
        except asyncio.CancelledError:
            return [of_version(scenario.id, 0)]  # all of its rollouts had ended

    learned = await alearn(machine, gather, scenarios(2), groups_per_step=1, steps=1)
    assert [g.scenario.id for g in learned.unused] == ["s1"]
