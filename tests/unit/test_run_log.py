"""What a run writes down after a training step: one curve over restarts, nothing twice, nothing missing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.trajectories import a_trajectory

from art_core.observe.phases import Training
from art_core.observe.run_log import RunLog
from art_core.recording import Rollout
from art_core.store import Store
from art_core.training.report import TrainReport
from art_core.training.trained import StepTraining
from art_core.types import Failure, RolloutStatus, Scenario, TrajectoryGroup

WHEN = Training(1010.0, 1010.0, 1011.0, 1012.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("games", tmp_path) as store:
        yield store


def a_log(store: Store, run: str) -> RunLog:
    return RunLog(store, run, [], Path("unused"))


def curve(store: Store, run: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in store.metrics(run, "policy_version")]


def test_steps_without_a_new_version_have_numbers_of_their_own_over_restarts(store: Store) -> None:
    first = store.begin_run("agent")
    log, report = a_log(store, first), TrainReport({"loss": 0.5})
    for version in (1, 1, 2):  # the second call changed nothing
        log.record(report, [], WHEN, version, {"serving/preemptions": 0.0})
    assert curve(store, first) == [(1, 1.0), (2, 1.0), (3, 2.0)]
    second = store.begin_run("agent", continues=first)
    a_log(store, second).record(report, [], WHEN, 3, {})
    assert curve(store, second) == [(4, 3.0)]
    fork = store.begin_run("fork")  # begins with version 7 of something else
    a_log(store, fork).record(report, [], WHEN, 8, {})
    assert curve(store, fork) == [(8, 8.0)]
    assert [m.value for m in store.metrics(first, "serving/preemptions")] == [0.0] * 3


def test_an_update_whose_process_died_is_completed_once(store: Store) -> None:
    first = store.begin_run("agent")
    a_log(store, first).record(TrainReport({"loss": 0.5}), [], WHEN, 1, {})
    second = store.begin_run("agent", continues=first)
    log = a_log(store, second)
    log.complete(TrainReport({"loss": 0.5}), 1)  # that one is on record
    log.complete(TrainReport({"loss": 0.25}), 2)
    log.complete(TrainReport({"loss": 0.25}), 2)
    assert curve(store, first) + curve(store, second) == [(1, 1.0), (2, 2.0)]
    assert [m.value for m in store.metrics(second, "loss")] == [0.25]


def test_failures_of_dropped_groups_are_counted_and_none_twice(store: Store) -> None:
    run = store.begin_run("agent")
    log = a_log(store, run)
    recorded = Rollout(sink=store.sink(run)).fail(Failure("timeout", "too slow"))
    Rollout(sink=store.sink(run)).fail(Failure("exception", "boom"))  # its group never came to training
    imported = a_trajectory(
        "t-1", steps=0, status=RolloutStatus.FAILED, reward=None, failure=Failure("timeout", "too slow")
    )
    group = TrajectoryGroup(Scenario("s"), (recorded, imported), "g-1")
    for version in (1, 2):
        log.record(TrainReport({}), [group] if version == 1 else [], WHEN, version, {})
    told = {(m.step, m.name): m.value for m in store.metrics(run) if m.name.startswith("failures/")}
    assert told == {(1, "failures/timeout"): 2.0, (1, "failures/exception"): 1.0}


def test_what_was_trained_is_kept_under_the_steps_number(store: Store) -> None:
    run = store.begin_run("agent")
    store.save_trajectory(a_trajectory("t-1"), run_id=run)
    trained = StepTraining("s-t-1-0", 0.5, b"\0\0\x80\x3f" * 2, bytes([1, 1]))
    a_log(store, run).record(TrainReport({}, trained=(trained,)), [], WHEN, 4, {})
    (kept,) = store.trained("t-1")
    assert (kept.train_step, kept.ratio, kept.trained) == (4, (1.0, 1.0), (True, True))
