"""What people said, what training did, and which policy answered are kept beside trajectories."""

import math
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.trajectories import a_step, a_trajectory

from art_core.errors import RewardError, StoreError, UnknownTrajectoryError
from art_core.recording import Rollout
from art_core.store import FeedbackKind, Store, TrainedStep
from art_core.training.trained import StepTraining
from art_core.types import PolicyVersion


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("games", tmp_path) as store:
        yield store


def policy_numbers(store: Store) -> dict[str, int | None]:
    with closing(sqlite3.connect(store.location)) as connection:
        return dict(connection.execute("SELECT id, policy_number FROM trajectories"))


def answered_by(step_id: str, rollout: str, number: int | None) -> Any:
    policy = None if number is None else PolicyVersion("agent", number)
    return replace(a_step(rollout), id=step_id, policy=policy)


def test_feedback_is_kept_and_leaves_the_reward_alone(store: Store) -> None:
    run = store.begin_run("agent")
    for name in ("t-1", "t-2"):
        store.save_trajectory(a_trajectory(name), run_id=run)
    store.save_trajectory(a_trajectory("t-3"))
    store.add_feedback("t-1", kind="thumb", value=-1, author="ann", comment="wrong \ud83d city")
    store.add_feedback("t-2", kind=FeedbackKind.SCORE, value=0.25, author="bob")
    store.add_feedback("t-2", kind="choice", value=1, author="ann", over="t-1")
    store.add_feedback("t-3", kind="thumb", value=1, author="bob")
    first, *others = store.feedback(run_id=run)
    assert (first.trajectory_id, first.kind, first.value) == ("t-1", FeedbackKind.THUMB, -1.0)
    assert (first.author, first.comment, first.over) == ("ann", "wrong \\ud83d city", None)
    assert [(f.kind, f.value, f.over) for f in others] == [("score", 0.25, None), ("choice", 1.0, "t-1")]
    assert [f.author for f in store.feedback("t-3")] == ["bob"]
    assert len(store.feedback()) == 4
    assert store.trajectory("t-1").reward == 0.5
    assert [score.author for score in store.scores("t-1")] == ["rollout"]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"kind": "thumb", "value": 0.5}, r"value of a thumb is 1 \(up\) or -1 \(down\), got 0.5"),
        ({"kind": "score", "value": 1.5}, "a number from 0 to 1, got 1.5"),
        ({"kind": "score", "value": math.nan}, "a number from 0 to 1, got nan"),
        ({"kind": "score", "value": True}, "a number from 0 to 1, got True"),
        ({"kind": "choice", "value": 0, "over": "t-2"}, r"1 \(better\) or 0.5 \(a tie\), got 0"),
        ({"kind": "choice", "value": 1}, "a choice over nothing"),
        ({"kind": "choice", "value": 1, "over": "t-1"}, "over 't-1'"),
        ({"kind": "thumb", "value": 1, "over": "t-2"}, "a thumb over 't-2'"),
        ({"kind": "stars", "value": 5}, "no kind 'stars'; choose one of thumb, score, choice"),
        ({"kind": "thumb", "value": 1, "author": " "}, "say who gives it"),
    ],
)
def test_feedback_that_means_nothing_is_refused(store: Store, given: dict[str, Any], complaint: str) -> None:
    store.save_trajectory(a_trajectory("t-1"))
    store.save_trajectory(a_trajectory("t-2"))
    options: dict[str, Any] = {"author": "ann"} | given
    with pytest.raises(RewardError, match=complaint):
        store.add_feedback("t-1", **options)
    assert store.feedback() == []


@pytest.mark.parametrize(("of", "over"), [("t-9", "t-1"), ("t-1", "t-9")])
def test_feedback_needs_trajectories_that_are_there(store: Store, of: str, over: str) -> None:
    store.save_trajectory(a_trajectory("t-1"))
    with pytest.raises(UnknownTrajectoryError, match="no rollout t-9"):
        store.add_feedback(of, kind="choice", value=0.5, author="ann", over=over)


def test_what_training_did_is_read_back_with_its_step(store: Store) -> None:
    run = store.begin_run("agent")
    store.save_trajectory(a_trajectory("t-1"), run_id=run)
    ratio = struct.pack("<2f", 0.75, math.nan)
    trained = StepTraining("s-t-1-0", -0.5, ratio, bytes([3, 0]))
    store.log_trained(run, 4, [trained])
    store.log_trained(run, 5, [replace(trained, advantage=0.5)])
    # The same step of training once more, which trained the step twice and only its first token.
    short = replace(trained, advantage=0.25, ratio=ratio[:4], marks=bytes([1]))
    store.log_trained(run, 5, [trained, short])
    first, second = store.trained("t-1")
    assert first == TrainedStep(
        run_id=run,
        train_step=4,
        step_id="s-t-1-0",
        advantage=-0.5,
        ratio=(0.75, None),
        trained=(True, False),
        clipped=(True, False),
    )
    assert (second.train_step, second.advantage) == (5, 0.25)
    assert (second.ratio, second.trained) == ((0.75, None), (True, False))
    store.log_trained(run, 6, [])
    assert len(store.trained("t-1")) == 2
    with pytest.raises(StoreError, match="no run r-9"):
        store.log_trained("r-9", 1, [trained])


def test_a_trajectory_knows_the_newest_policy_that_answered_in_it(store: Store) -> None:
    rollout, other = Rollout(sink=store.sink()), Rollout(sink=store.sink())
    for number, policy in enumerate([3, None, 5, 4]):
        rollout.record(answered_by(f"s-{number}", rollout.id, policy))
    other.record(answered_by("s-other", other.id, None))
    assert policy_numbers(store) == {rollout.id: 5, other.id: None}  # also while it runs
    rollout.finish(1.0)
    other.finish(0.0)
    rollout.record(answered_by("s-late", rollout.id, 6))
    store.save_trajectory(store.trajectory(other.id).with_reward(1.0))
    assert policy_numbers(store) == {rollout.id: 6, other.id: None}
    store.save_trajectory(a_trajectory("t-1"))
    assert policy_numbers(store)["t-1"] == 2


def test_a_run_says_which_one_it_continues(store: Store) -> None:
    first = store.begin_run("agent")
    store.begin_run("agent", continues=first)
    assert [run.continues for run in store.runs()] == [None, first]
