"""Lists of a store: filters, orders, pages that stay put while others record."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.trajectories import a_step, a_trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from art_core.errors import ConfigError, UnknownTrajectoryError
from art_core.recording import Rollout
from art_core.store import Store
from art_core.store.browse import (
    Page,
    TrajectoryFilter,
    TrajectoryRow,
    choices,
    count_trajectories,
    list_groups,
    list_trajectories,
    run_summaries,
    trajectory_row,
)
from art_core.store.over_time import middle_rollouts, scenario_versions
from art_core.store.packing import ids_to_bytes
from art_core.store.parts import group_size, group_tokens, group_without_tokens, read_step
from art_core.types import (
    Failure,
    PolicyVersion,
    RolloutStatus,
    Scenario,
    StepIdentity,
    Trajectory,
    TrajectoryGroup,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("browse", tmp_path) as opened:
        yield opened


def member(
    name: str, reward: float | None, *, node: str = "player", number: int = 0, scenario: str = "board-1"
) -> Trajectory:
    """A rollout of one call; without a reward, one that failed."""
    step = a_step(name, identity=StepIdentity(node=node), policy=PolicyVersion("agent", number))
    outcome: dict[str, Any] = {"reward": reward}
    if reward is None:
        failure = Failure('time"out', "it took too long")
        outcome |= {"status": RolloutStatus.FAILED, "failure": failure}
    return replace(a_trajectory(name, scenario=Scenario(scenario)), steps=(step,), **outcome)


def save(store: Store, *members: Trajectory, run: str | None = None, group: str = "") -> str:
    return store.save_group(TrajectoryGroup(members[0].scenario, members, group), run_id=run)


def ids(page: Page[TrajectoryRow]) -> list[str]:
    return [row.id for row in page.items]


def all_pages(store: Store, which: TrajectoryFilter, limit: int) -> list[str]:
    found: list[str] = []
    after = None
    while True:
        page = list_trajectories(store, which, limit, after)
        assert len(page.items) <= limit
        found += ids(page)
        if page.next is None:
            return found
        after = page.next


def test_a_row_says_what_a_list_shows(store: Store) -> None:
    run = store.begin_run("agent")
    group = save(store, member("good", 0.75, number=3), member("bad", None, node="judge"), run=run)
    bad, good = list_trajectories(store, TrajectoryFilter(run_id=run)).items
    assert (good.id, good.group_id, good.scenario_id, good.reward) == ("good", group, "board-1", 0.75)
    assert (good.policy_number, good.steps, good.nodes, good.cause) == (3, 1, ("player",), None)
    assert (bad.status, bad.cause, bad.failure) == (RolloutStatus.FAILED, 'time"out', "it took too long")
    assert (bad.reward, bad.nodes) == (None, ("judge",))


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, ["d", "c", "b", "a"]),
        ({"order": "oldest"}, ["a", "b", "c", "d"]),
        ({"order": "best"}, ["b", "d", "a"]),
        ({"order": "worst"}, ["a", "d", "b"]),
        ({"policy_number": 2}, ["c", "b"]),
        ({"scenario_id": "board-2"}, ["d"]),
        ({"scenario_id": "board-9"}, []),
        ({"node": "judge"}, ["c"]),
        ({"status": "failed"}, ["c"]),
        ({"cause": 'time"out'}, ["c"]),
        ({"cause": "time"}, []),
        ({"reward_min": 0.5}, ["d", "b"]),
        ({"reward_max": 0.5}, ["d", "a"]),
        ({"reward_min": 0.5, "reward_max": 0.5}, ["d"]),
        ({"group_id": "g-2"}, ["d"]),
        ({"run_id": "nobody's"}, []),
        ({"policy_number": 2, "status": "finished"}, ["b"]),
    ],
)
def test_each_condition_narrows_the_list_and_its_count(
    store: Store, conditions: dict[str, Any], expected: list[str]
) -> None:
    save(store, member("a", 0.1), member("b", 0.9, number=2), member("c", None, node="judge", number=2))
    save(store, member("d", 0.5, scenario="board-2"), group="g-2")
    which = TrajectoryFilter(**conditions)
    assert ids(list_trajectories(store, which)) == expected
    if which.order not in ("best", "worst"):  # these leave out what has no reward
        assert count_trajectories(store, which) == len(expected)


@settings(max_examples=25, deadline=None)
@given(
    rewards=st.lists(st.none() | st.sampled_from([-1.5, 0.0, 1e-300, 0.1, 1.0]), max_size=12),
    order=st.sampled_from(["newest", "oldest", "best", "worst"]),
    limit=st.integers(1, 5),
)
def test_pages_together_are_the_whole_list(
    tmp_path_factory: pytest.TempPathFactory, rewards: list[float | None], order: Any, limit: int
) -> None:
    with Store.open("pages", tmp_path_factory.mktemp("pages")) as store:
        for number, reward in enumerate(rewards):
            store.save_trajectory(member(f"t-{number}", reward))
        which = TrajectoryFilter(order=order)
        assert all_pages(store, which, limit) == ids(list_trajectories(store, which, 100))


def test_the_next_page_goes_on_where_the_last_one_ended_whatever_was_recorded_meanwhile(store: Store) -> None:
    save(store, *(member(f"t-{n}", n / 10) for n in range(4)))
    which = TrajectoryFilter()
    first = list_trajectories(store, which, 2)
    store.save_trajectory(member("new", 0.0))
    assert ids(first) == ["t-3", "t-2"]
    assert ids(list_trajectories(store, which, 2, first.next)) == ["t-1", "t-0"]


@pytest.mark.parametrize("after", ["", "x", "1~2~3", "nan~x", "0.5"])
def test_a_page_that_there_is_not_is_refused(store: Store, after: str) -> None:
    with pytest.raises(ConfigError, match="begin at the first"):
        list_trajectories(store, TrajectoryFilter(order="best"), after=after)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"order": "random"}, "order='random': expected one of newest"),
        ({"status": "lost"}, "status='lost': expected one of running"),
        ({"reward_min": float("nan")}, "reward_min is not a number"),
    ],
)
def test_a_filter_that_means_nothing_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrajectoryFilter(**settings)


def test_a_page_has_a_greatest_size(store: Store) -> None:
    with pytest.raises(ConfigError, match="limit=0: expected 1 to 500"):
        list_trajectories(store, TrajectoryFilter(), 0)
    with pytest.raises(ConfigError, match="limit=501"):
        list_groups(store, limit=501)


def test_groups_are_listed_with_what_their_members_got(store: Store) -> None:
    run = store.begin_run("agent")
    first = save(store, member("a", 0.2, number=1), member("b", None, number=2), member("c", 0.8), run=run)
    second = save(store, member("d", 0.5, number=4, scenario="board-2"), run=run)
    save(store, member("e", 1.0))
    latest, earlier = list_groups(store, run).items
    assert (latest.id, earlier.id) == (second, first)
    assert (earlier.size, earlier.failed, earlier.rewards, earlier.policy_numbers) == (
        3,
        1,
        (0.2, 0.8),
        (0, 2),
    )
    assert earlier.reward_mean == pytest.approx(0.5)
    assert earlier.spread == pytest.approx(0.6)
    assert [g.id for g in list_groups(store, run, 4).items] == [second]
    assert [g.id for g in list_groups(store, scenario_id="board-2").items] == [second]
    page = list_groups(store, run, limit=1)
    assert [g.id for g in list_groups(store, run, limit=1, after=page.next).items] == [first]


@pytest.mark.parametrize(
    ("narrowed", "expected"),
    [
        ({"member": TrajectoryFilter()}, ["g-3", "g-2", "g-1"]),
        ({"member": TrajectoryFilter(node="judge")}, ["g-1"]),
        ({"member": TrajectoryFilter(cause='time"out')}, ["g-1"]),
        ({"member": TrajectoryFilter(reward_min=0.6)}, ["g-2", "g-1"]),
        ({"member": TrajectoryFilter(reward_min=0.3, reward_max=0.6)}, ["g-3"]),
        ({"member": TrajectoryFilter(policy_number=2)}, ["g-3", "g-1"]),
        ({"member": TrajectoryFilter(policy_number=2, reward_min=0.6)}, []),  # one and the same member
        ({"flat": True}, ["g-2"]),
        ({"flat": False}, ["g-1"]),
        ({"flat": True, "member": TrajectoryFilter(node="judge")}, []),
    ],
)
def test_groups_are_found_by_what_a_member_did_and_by_whether_they_teach(
    store: Store, narrowed: dict[str, Any], expected: list[str]
) -> None:
    failed = member("c", None, node="judge", number=2)
    save(store, member("a", 0.1), member("b", 0.9), failed, group="g-1")
    save(store, member("d", 0.7), member("e", 0.7 + 1e-9), group="g-2")
    save(store, member("f", 0.5, number=2), group="g-3")  # alone: neither flat nor not
    found = list_groups(store, **narrowed).items
    assert [group.id for group in found] == expected
    assert [group.flat for group in found] == [group.id == "g-2" for group in found]


def test_a_group_without_scored_members_has_no_mean(store: Store) -> None:
    save(store, member("a", None))
    (group,) = list_groups(store).items
    assert (group.reward_mean, group.spread, group.failed) == (None, None, 1)


def test_what_can_be_filtered_by_is_what_a_run_has(store: Store) -> None:
    run = store.begin_run("agent")
    save(store, member("a", 0.2, number=1), member("b", None, node="judge", number=5), run=run)
    save(store, member("c", 0.2, node="elsewhere", number=9))
    of_run = choices(store, run)
    assert (of_run.policy_numbers, of_run.nodes, of_run.causes) == (
        (1, 5),
        ("judge", "player"),
        ('time"out',),
    )
    assert choices(store).nodes == ("elsewhere", "judge", "player")


def test_a_cause_that_is_no_name_is_not_offered_and_hides_no_other(store: Store) -> None:
    for name, cause in (("t-long", '<b>"' + "x" * 10_000), ("t-short", "timeout")):
        failure = Failure(cause, "it took too long")
        store.save_trajectory(replace(member(name, None), failure=failure))
    assert choices(store).causes == ("timeout",)
    assert count_trajectories(store, TrajectoryFilter(status="failed")) == 2


def test_runs_are_summed_up_newest_first_with_a_sparkline_that_stays_short(store: Store) -> None:
    old, new = store.begin_run("agent"), store.begin_run("other")
    save(store, member("a", 0.2), member("b", 0.4), run=old)
    for step in range(1, 301):
        store.log_metrics(old, step, {"reward_mean": step / 300, "loss": 1.0})
    empty, long = run_summaries(store)
    assert (empty.run.id, empty.steps, empty.trajectories, empty.reward_mean, empty.sparkline) == (
        new, 0, 0, None, (),
    )  # fmt: skip
    assert (long.run.id, long.steps, long.trajectories, long.reward_mean) == (old, 300, 2, 1.0)
    assert 50 <= len(long.sparkline) <= 62
    assert long.sparkline[-1] == 1.0
    assert list(long.sparkline) == sorted(long.sparkline)


def test_one_row_and_one_step_are_read_by_themselves(store: Store) -> None:
    run = store.begin_run("agent")
    made = member("a", 0.2, number=4)
    save(store, made, run=run)
    row = trajectory_row(store, "a")
    assert (row.run_id, row.policy_number, row.steps) == (run, 4, 1)
    assert read_step(store, "a", made.steps[0].id) == made.steps[0]
    with pytest.raises(UnknownTrajectoryError, match="no trajectory nobody"):
        trajectory_row(store, "nobody")
    with pytest.raises(UnknownTrajectoryError, match="trajectory b has no step"):
        read_step(store, "b", made.steps[0].id)


@pytest.mark.parametrize(
    ("answered", "number"),
    [
        (["agent@3", "judge@12"], 3),
        (["judge@12", "agent@3"], 3),
        (["judge@12", "agent@3", "agent@4"], 4),
        (["judge@12", "judge@11"], 12),  # nothing of the run's own
    ],
)
def test_a_rollout_of_several_policies_counts_as_its_runs_own(
    store: Store, answered: list[str], number: int
) -> None:
    run = store.begin_run("agent")
    rollout = Rollout(rollout_id="a", sink=store.sink(run))
    for name in answered:
        model, _, version = name.partition("@")
        rollout.record(replace(a_step("a"), id=name, policy=PolicyVersion(model, int(version))))
    rollout.finish(1.0)
    assert trajectory_row(store, "a").policy_number == number
    assert [row.number for row in scenario_versions(store, "default", run)] == [number]


def test_a_groups_parts_are_what_the_whole_group_says(store: Store) -> None:
    texts = replace(member("b", None), steps=(a_step("b", tokens=None),))
    group = save(store, member("a", 0.2), texts, member("c", 0.8))
    whole = store.group(group)
    bare = [replace(t, steps=tuple(replace(s, tokens=None) for s in t.steps), spans=()) for t in whole]
    assert group_without_tokens(store, group) == whole.with_trajectories(tuple(bare))
    assert group_tokens(store, group) == [
        [s.tokens and (ids_to_bytes(s.tokens.prompt), ids_to_bytes(s.tokens.completion)) for s in t.steps]
        for t in whole
    ]
    before = group_size(store, group)
    assert before[0] == 3
    store.save_trajectory(replace(whole.trajectories[0], steps=(a_step("a", 7),)))
    assert group_size(store, group) > before
    with pytest.raises(UnknownTrajectoryError, match="no group nobody"):
        group_without_tokens(store, "nobody")
    with pytest.raises(UnknownTrajectoryError, match="no group nobody"):
        group_tokens(store, "nobody")


def test_a_scenario_is_summed_up_by_policy_version_with_the_rollout_in_the_middle(store: Store) -> None:
    run = store.begin_run("agent")
    save(
        store,
        *(member(f"a{n}", n / 10, number=1) for n in (5, 1, 3)),
        member("lost", None, number=1),
        run=run,
    )
    save(store, member("late", None, number=7), run=run)
    save(store, member("elsewhere", 1.0, number=1, scenario="board-2"), member("plain", 0.5, number=2))
    first, last = scenario_versions(store, "board-1", run)
    assert (first.number, first.size, first.failed, first.scored) == (1, 4, 1, 3)
    assert (first.mean, first.least, first.greatest) == (pytest.approx(0.3), 0.1, 0.5)
    assert (last.number, last.size, last.failed, last.mean) == (7, 1, 1, None)
    assert middle_rollouts(store, "board-1", run) == {1: "a3", 7: "late"}
    assert middle_rollouts(store, "board-1") == {1: "a3", 2: "plain", 7: "late"}
    assert scenario_versions(store, "board-9") == []
