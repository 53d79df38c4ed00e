"""The store in one process: what is written comes back, and what is refused says why."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.trajectories import a_step, a_trajectory
from sqlalchemy import event

from art_core.errors import RewardError, StoreError, UnknownTrajectoryError
from art_core.recording import Rollout
from art_core.store import RunState, Store
from art_core.types import (
    Failure,
    PolicyVersion,
    RolloutStatus,
    Scenario,
    Span,
    StepTokens,
    Trajectory,
    TrajectoryGroup,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("games", tmp_path) as store:
        yield store


def test_a_recorded_rollout_is_read_back_as_it_ended(store: Store) -> None:
    rollout = Rollout(Scenario("s", {"n": 1}), sink=store.sink(), group_id="g-1", metadata={"seed": 7})
    for number in range(3):
        rollout.record(a_step(rollout.id, number))
    rollout.components["style"] = 0.25
    ended = rollout.finish(0.75)
    assert store.trajectory(rollout.id) == ended
    assert list(store.trajectories(group_id="g-1")) == [ended]
    assert [s.author for s in store.scores(rollout.id)] == ["rollout"]


def test_a_failed_rollout_keeps_its_steps_and_refuses_a_reward(store: Store) -> None:
    """C10."""
    rollout = Rollout(sink=store.sink())
    rollout.record(a_step(rollout.id))
    ended = rollout.fail(Failure("exception", "boom", "builtins.ValueError"))
    assert store.trajectory(rollout.id) == ended
    with pytest.raises(RewardError, match="boom"):
        store.score(rollout.id, 1.0, author="judge")
    assert store.scores(rollout.id) == []


def test_a_reward_that_is_no_number_is_refused_and_the_old_one_stays(store: Store) -> None:
    store.save_group(TrajectoryGroup(Scenario("s"), (a_trajectory("t-1"),), "g"))
    with pytest.raises(RewardError, match="t-1"):
        store.score("t-1", float("nan"), author="judge")
    assert store.trajectory("t-1").reward == 0.5


def test_a_steps_rollout_must_have_begun(store: Store) -> None:
    with pytest.raises(UnknownTrajectoryError, match="t-nowhere"):
        store.sink().append(a_step("t-nowhere")).result()


def test_runs_metrics_versions_and_events_are_kept(store: Store) -> None:
    run = store.begin_run("agent", {"lr": 1e-5})
    store.log_metrics(run, 1, {"loss": 0.5, "kl": float("nan")})
    store.add_version(PolicyVersion("agent", 1), "/tmp/agent@1", metadata={"step": 1}, run_id=run)
    store.add_event(run, "skipped_update", "KL was 2.0", {"kl": 2.0})
    store.end_run(run, RunState.STOPPED)
    (ended,) = store.runs()
    assert (ended.model, ended.config, ended.state) == ("agent", {"lr": 1e-5}, RunState.STOPPED)
    assert [(m.step, m.name, str(m.value)) for m in store.metrics(run)] == [
        (1, "loss", "0.5"),
        (1, "kl", "nan"),
    ]
    (version,) = store.versions("agent")
    assert version.policy.name == "agent@1"
    assert version.adapter_dir == Path("/tmp/agent@1")
    assert [e.message for e in store.events(run)] == ["KL was 2.0"]
    with pytest.raises(StoreError, match="agent@1"):
        store.add_version(PolicyVersion("agent", 1), "/tmp/other")


def test_a_group_keeps_its_order_and_what_was_scored_since(store: Store) -> None:
    members = tuple(a_trajectory(f"t-{n}", reward=None) for n in (3, 1, 2))
    group = TrajectoryGroup(Scenario("s"), members, "g-1")
    store.save_group(group)
    store.score("t-1", 0.25, author="rule", components={"legal": 0.25}, explanation="one of four")
    store.score("t-1", 1.0, author="person")
    store.save_group(group)
    assert [t.id for t in store.group("g-1")] == ["t-3", "t-1", "t-2"]
    assert [t.reward for t in store.group("g-1")] == [None, 1.0, None]
    assert [(s.author, s.reward, s.explanation) for s in store.scores("t-1")] == [
        ("rule", 0.25, "one of four"),
        ("person", 1.0, ""),
    ]


def test_a_group_without_an_id_gets_one(store: Store) -> None:
    group_id = store.save_group(TrajectoryGroup(Scenario("s"), (a_trajectory("t-1"),)))
    assert store.group(group_id).id == group_id
    assert store.trajectory("t-1").group_id == group_id


def test_saving_adds_what_a_recorded_rollout_lacks(store: Store) -> None:
    rollout = Rollout(sink=store.sink())
    rollout.record(a_step(rollout.id))
    scored = rollout.finish().with_reward(0.5)
    store.save_trajectory(scored)
    assert store.trajectory(rollout.id) == scored
    assert [s.reward for s in store.scores(rollout.id)] == [0.5]


@pytest.mark.parametrize("of", ["", "t-other"])
def test_a_step_of_another_rollout_is_refused_and_the_way_out_is_said(store: Store, of: str) -> None:
    store.save_trajectory(a_trajectory("t-other"))
    stray = replace(a_step("t-1"), rollout_id=of)
    wrong = replace(a_trajectory("t-1"), steps=(stray,))
    with pytest.raises(StoreError, match=rf"trajectory t-1 says that it is of '{of}'.*give it that one's id"):
        store.save_group(TrajectoryGroup(Scenario("s"), (wrong,)))
    assert [t.id for t in store.trajectories()] == ["t-other"]
    assert store.trajectory("t-other") == a_trajectory("t-other")


def test_several_groups_are_kept_all_or_none(store: Store) -> None:
    whole = [TrajectoryGroup(Scenario(f"s{n}"), (a_trajectory(f"t-{n}"),)) for n in range(3)]
    bad = replace(a_trajectory("t-3"), metadata={"value": {(1, 2): 3}})
    with pytest.raises(StoreError, match="trajectory t-3 cannot be recorded"):
        store.save_groups([replace(whole[0], id="g-x"), *whole[1:], TrajectoryGroup(Scenario("s"), (bad,))])
    assert list(store.trajectories()) == []
    ids = store.save_groups(whole)
    assert [[t.id for t in store.group(group_id)] for group_id in ids] == [["t-0"], ["t-1"], ["t-2"]]
    assert store.save_groups([]) == []


@pytest.mark.parametrize("size", [2, 20])
def test_a_groups_members_are_looked_up_together_and_only_what_is_new_of_them_is_written(
    store: Store, size: int
) -> None:
    def played(number: int) -> Trajectory:
        rollout = Rollout(Scenario("s"), sink=store.sink(), rollout_id=f"t-{number}", group_id="g-1")
        rollout.record(a_step(rollout.id))
        rollout.add_span(Span(id=f"r-{number}", kind="tool", name="search", started_at=1.0, duration=2.0))
        return rollout.finish(0.5)

    first, second, *others = map(played, range(size))
    longer = replace(first, steps=(*first.steps, a_step(first.id, 1)))
    rescored = second.with_reward(1.0)
    statements: list[str] = []
    event.listen(store._engine, "before_cursor_execute", lambda *about: statements.append(about[2]))
    store.save_group(TrajectoryGroup(Scenario("s"), (longer, rescored, *others, longer), "g-1"))
    assert sum(statement.startswith("SELECT") for statement in statements) == 3  # rewards, steps, spans
    assert {t.id: t for t in store.group("g-1")} == {t.id: t for t in (longer, rescored, *others)}
    assert [s.reward for s in store.scores(rescored.id)] == [0.5, 1.0]
    assert [s.reward for s in store.scores(longer.id)] == [0.5]


def test_a_step_that_arrives_after_the_end_is_kept(store: Store) -> None:
    rollout = Rollout(sink=store.sink())
    rollout.finish(1.0)
    rollout.record(a_step(rollout.id))
    assert len(store.trajectory(rollout.id).steps) == 1


def test_ids_are_never_used_twice(store: Store) -> None:
    sink = store.sink()
    started = a_trajectory("t-1", steps=0, status=RolloutStatus.RUNNING, reward=None)
    sink.begin(started).result()
    sink.append(a_step("t-1")).result()
    with pytest.raises(StoreError, match="rollout t-1: there is one with this id"):
        sink.begin(started).result()
    with pytest.raises(StoreError, match=r"s-t-1-0 .*there is a step with this id"):
        sink.append(a_step("t-1")).result()
    sink.end(a_trajectory("t-1")).result()
    with pytest.raises(StoreError, match="t-1: it has ended already"):
        sink.end(a_trajectory("t-1")).result()


def test_one_faulty_record_among_many_fails_alone(store: Store) -> None:
    rollout = Rollout(sink=store.sink())
    futures = [rollout.submit(a_step(rollout.id, n)) for n in range(50)]
    faulty = store.sink().append(a_step("t-nowhere"))
    unwritable = store.sink().append(a_step(rollout.id, 99, finish_reason="\ud83d"))
    futures += [rollout.submit(a_step(rollout.id, n)) for n in range(50, 100 - 1)]
    with pytest.raises(UnknownTrajectoryError, match="t-nowhere"):
        faulty.result()
    with pytest.raises(StoreError, match="surrogates not allowed"):
        unwritable.result()
    for future in futures:
        future.result()
    assert len(store.trajectory(rollout.id).steps) == 99


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": ({"role": "user", ("a", "b"): 1},)},
        {"tokens": StepTokens((2**40,), (), ())},
    ],
    ids=["a key that JSON lacks", "a token id beyond int32"],
)
def test_a_step_that_cannot_be_encoded_is_refused_by_name(store: Store, changes: dict[str, object]) -> None:
    rollout = Rollout(sink=store.sink())
    with pytest.raises(StoreError, match=f"step s-{rollout.id}-0 of rollout {rollout.id}"):
        rollout.record(a_step(rollout.id, **changes))


def test_a_recording_that_is_cancelled_is_still_kept(store: Store) -> None:
    rollout = Rollout(sink=store.sink())
    future = rollout.submit(a_step(rollout.id))
    assert not future.cancel()
    future.result()
    assert len(store.trajectory(rollout.id).steps) == 1


def test_trajectories_are_found_by_run_group_scenario_and_status(store: Store) -> None:
    run = store.begin_run("agent")
    store.save_group(
        TrajectoryGroup(Scenario("s"), (a_trajectory("t-1"), a_trajectory("t-2")), "g"), run_id=run
    )
    failed = a_trajectory(
        "t-3",
        scenario=Scenario("other"),
        status=RolloutStatus.FAILED,
        reward=None,
        failure=Failure("timeout", ""),
    )
    store.save_trajectory(failed)

    def found(**conditions: object) -> list[str]:
        return [t.id for t in store.trajectories(**conditions)]  # type: ignore[arg-type]

    assert found() == ["t-1", "t-2", "t-3"]
    assert found(run_id=run) == ["t-1", "t-2"]
    assert found(group_id="g", limit=1) == ["t-1"]
    assert found(scenario_id="other") == ["t-3"]
    assert found(status="failed") == ["t-3"]
    assert found(limit=0) == []
    assert [t.steps for t in store.trajectories(with_steps=False)] == [(), (), ()]


def test_an_iterator_pages_through_more_than_it_holds(store: Store) -> None:
    members = tuple(a_trajectory(f"t-{n}", steps=1) for n in range(130))
    store.save_group(TrajectoryGroup(Scenario("s"), members, "g"))
    assert [t.id for t in store.trajectories()] == [m.id for m in members]
    assert len(list(store.trajectories(limit=70))) == 70


def test_what_is_not_there_is_named(store: Store) -> None:
    with pytest.raises(UnknownTrajectoryError, match="t-9"):
        store.trajectory("t-9")
    with pytest.raises(UnknownTrajectoryError, match="g-9"):
        store.group("g-9")
    with pytest.raises(UnknownTrajectoryError, match="t-9"):
        store.score("t-9", 1.0, author="judge")
    with pytest.raises(StoreError, match="no such run"):
        store.end_run("r-9")
    with pytest.raises(StoreError, match="no run r-9"):
        store.log_metrics("r-9", 1, {"loss": 1.0})
    with pytest.raises(StoreError, match="no run r-9"):
        Rollout(sink=store.sink("r-9")).finish()


def test_metrics_of_a_step_done_again_replace_the_earlier_ones(store: Store) -> None:
    run = store.begin_run("agent")
    store.log_metrics(run, 1, {"loss": 0.5, "kl": 0.1})
    store.log_metrics(run, 1, {"loss": 0.25})
    assert {m.name: m.value for m in store.metrics(run)} == {"loss": 0.25, "kl": 0.1}
    assert [m.value for m in store.metrics(run, "loss")] == [0.25]
