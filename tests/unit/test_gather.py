"""Scenarios x group size: what comes back, in which order, and with which seeds."""

import asyncio
import contextvars
import threading

import pytest
from helpers.gathering import THREE, say, talk
from hypothesis import given
from hypothesis import strategies as st

from art_core.errors import ConfigError
from art_core.gather import agather, gather, member_seed
from art_core.recording import current_rollout
from art_core.types import RolloutStatus, Scenario


async def test_every_scenario_is_run_group_size_times_in_order_however_long_each_takes() -> None:
    async def agent(scenario: Scenario) -> str:
        rollout = current_rollout()
        assert rollout is not None
        await asyncio.sleep(0.02 if scenario.id == "a" else 0)
        say(f"{scenario.id}{rollout.metadata['member']}")
        return scenario.id

    groups = await agather(agent, THREE, group_size=4, reward=lambda t: float(t.metadata["member"]))
    assert [g.scenario.id for g in groups] == ["a", "b", "c"]
    for group in groups:
        assert group.rewards == (0.0, 1.0, 2.0, 3.0)
        assert [t.steps[0].message() for t in group] == [f"{group.scenario.id}{i}" for i in range(4)]
        assert {t.group_id for t in group} == {group.id}
        assert all(t.status is RolloutStatus.FINISHED and t.duration is not None for t in group)
    assert len({g.id for g in groups}) == 3
    assert groups.mean_reward == 1.5
    assert not groups.dropped
    assert not groups.failed


async def test_two_hundred_rollouts_at_once_each_hold_exactly_their_own_steps() -> None:
    """C05."""
    running = most = 0

    async def agent(scenario: Scenario) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for turn in range(3):
            await asyncio.sleep(0.001)
            rollout = current_rollout()
            assert rollout is not None
            say(f"{scenario.id}/{rollout.metadata['member']}/{turn}")
        running -= 1

    scenarios = [Scenario(f"s{i}") for i in range(50)]
    groups = await agather(agent, scenarios, group_size=4, concurrency=200)
    assert most == 200
    for group in groups:
        for member, trajectory in enumerate(group):
            expected = [f"{group.scenario.id}/{member}/{turn}" for turn in range(3)]
            assert [s.message() for s in trajectory.steps] == expected
            assert {s.rollout_id for s in trajectory.steps} == {trajectory.id}


async def test_no_more_rollouts_run_at_once_than_asked_for() -> None:
    running = most = 0

    async def agent(scenario: Scenario) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        say()
        running -= 1

    await agather(agent, THREE, group_size=5, concurrency=3)
    assert most == 3


async def test_sync_agents_run_side_by_side_in_threads_with_their_own_rollout() -> None:
    together = threading.Barrier(20, timeout=60)

    def agent(scenario: Scenario) -> int:
        together.wait()
        say(str(threading.get_ident()))
        return 7

    (group,) = await agather(agent, [Scenario("s")], group_size=20, reward=lambda t, output: output)
    assert group.rewards == (7.0,) * 20
    assert all(len(t.steps) == 1 for t in group)


async def test_the_callers_context_reaches_every_agent_and_nothing_leaks_back() -> None:
    mine = contextvars.ContextVar("mine", default="unset")
    mine.set("set")
    seen: list[str] = []

    def sync_agent(scenario: Scenario) -> None:
        seen.append(mine.get())
        mine.set("changed")
        say()

    async def async_agent(scenario: Scenario) -> None:
        sync_agent(scenario)

    await agather(sync_agent, THREE, group_size=1)
    await agather(async_agent, THREE, group_size=1)
    assert seen == ["set"] * 6
    assert mine.get() == "set"
    assert current_rollout() is None


def test_gather_is_agather_for_sync_code_also_when_a_loop_is_running() -> None:
    assert len(gather(talk, THREE, group_size=2)) == 3

    async def notebook() -> int:
        return len(gather(talk, THREE, group_size=2))

    assert asyncio.run(notebook()) == 3


async def test_no_scenarios_give_no_groups() -> None:
    assert await agather(talk, [], group_size=4) == []


@pytest.mark.parametrize(
    ("scenarios", "message"),
    [
        (Scenario("a"), r"give a list: \[Scenario\('a'"),
        ([Scenario("a"), {"topic": "tea"}], r"scenarios\[1\] is dict; give Scenario"),
        (["tea"], r"scenarios\[0\] is str"),
    ],
)
async def test_what_is_no_list_of_scenarios_is_refused_before_anything_runs(scenarios, message) -> None:
    ran: list[Scenario] = []
    with pytest.raises(ConfigError, match=message):
        await agather(ran.append, scenarios, group_size=1)
    assert ran == []


# -- seeds -------------------------------------------------------------------------------------------


async def test_seeds_depend_on_scenario_member_and_base_alone() -> None:
    async def seeds(**options) -> list[int]:
        groups = await agather(talk, THREE, group_size=3, **options)
        return [t.metadata["seed"] for g in groups for t in g]

    first = await seeds(seed=0)
    assert first == await seeds(seed=0, concurrency=1)
    assert len(set(first)) == 9
    assert not set(first) & set(await seeds(seed=1))


async def test_a_scenario_that_is_given_twice_is_sampled_with_other_seeds() -> None:
    groups = await agather(talk, [Scenario("a"), Scenario("a")], group_size=2, seed=0)
    assert len({t.metadata["seed"] for g in groups for t in g}) == 4


async def test_without_a_seed_rollouts_have_none() -> None:
    def agent(scenario: Scenario) -> None:
        say()
        assert current_rollout().next_seed() is None

    (group,) = await agather(agent, [Scenario("a")], group_size=2)
    assert not any("seed" in t.metadata for t in group)


async def test_the_calls_of_a_seeded_rollout_have_seeds_of_their_own_and_the_same_ones_again() -> None:
    async def seeds() -> list[int]:
        seen: list[int] = []

        def agent(scenario: Scenario) -> None:
            say()
            seen.extend(current_rollout().next_seed() for _ in range(3))

        await agather(agent, [Scenario("a")], group_size=2, seed=0, concurrency=1)
        return seen

    first = await seeds()
    assert len(set(first)) == 6
    assert first == await seeds()


@given(st.text(), st.integers(0, 10**6), st.integers(-(10**9), 10**9))
def test_a_seed_is_a_small_natural_number_and_always_the_same(scenario: str, member: int, base: int) -> None:
    seed = member_seed(scenario.encode("utf-8", "replace").decode(), member, base)
    assert 0 <= seed < 2**31
    assert seed == member_seed(scenario.encode("utf-8", "replace").decode(), member, base)


def test_seeds_are_the_same_on_every_machine() -> None:
    assert member_seed("tic-tac-toe/0", 3, 7) == member_seed("tic-tac-toe/0", 3, 7, 1, 0)
    assert [member_seed("s", member) for member in range(2)] == [540614060, 801625296]
