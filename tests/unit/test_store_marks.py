from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.trajectories import a_span, a_step, a_trajectory

from art_core.recording import Rollout
from art_core.store import Store
from art_core.store.marks import Mark, changed, marks, newest


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("p", tmp_path) as store:
        yield store


def mark(store: Store, name: str = "t-1") -> Mark:
    (found,) = marks(store, trajectory_ids=[name])
    return found


def a_late_step(store: Store) -> None:
    store.save_trajectory(replace(a_trajectory("t-1"), steps=(a_step("t-1", 9),)))


def a_late_span(store: Store) -> None:
    store.save_trajectory(a_trajectory("t-1", spans=(a_span(0),)))


def more_metadata(store: Store) -> None:
    store.save_trajectory(a_trajectory("t-1", metadata={"judge": "said"}))


def a_step_reward(store: Store) -> None:
    store.save_trajectory(a_trajectory("t-1", step_rewards={"s-t-1-0": 1.0}))


CHANGES: list[tuple[Callable[[Store], None], bool]] = [
    (a_late_step, True),
    (a_late_span, True),
    (more_metadata, False),
    (a_step_reward, False),
    (lambda store: store.score("t-1", 0.5, author="the same reward again"), False),
    (lambda store: store.score("t-1", 0.75, author="ada"), False),
    (lambda store: store.add_feedback("t-1", kind="thumb", value=1, author="ada"), False),
]


@pytest.mark.parametrize(("change", "recorded"), CHANGES)
def test_a_mark_changes_with_anything_of_its_trajectory_and_of_no_other(
    store: Store, change: Callable[[Store], None], recorded: bool
) -> None:
    store.save_trajectory(a_trajectory("t-1"))
    store.save_trajectory(a_trajectory("t-2"))
    before, other = mark(store), mark(store, "t-2")
    assert mark(store) == before
    seen = newest(store)
    change(store)
    after = mark(store)
    assert after.digest != before.digest
    assert (after.recorded != before.recorded) == recorded
    assert mark(store, "t-2") == other
    if change not in (more_metadata, a_step_reward):
        assert changed(store, seen)[0] == ["t-1"]


def test_marks_say_whether_a_rollout_has_ended(store: Store) -> None:
    rollout = Rollout(sink=store.sink(), rollout_id="t-1")
    rollout.record(a_step("t-1"))
    running = mark(store)
    assert not running.ended
    rollout.finish(1.0)
    assert mark(store).ended
    assert mark(store).recorded != running.recorded


def test_marks_come_in_pages_of_one_run_or_of_all(store: Store) -> None:
    run = store.begin_run("agent")
    for number in range(450):
        store.save_trajectory(a_trajectory(f"t-{number}", 0), run_id=run if number % 3 == 0 else None)
    assert [m.trajectory_id for m in marks(store)] == [f"t-{n}" for n in range(450)]
    assert [m.trajectory_id for m in marks(store, run)] == [f"t-{n}" for n in range(0, 450, 3)]
    wanted = [f"t-{n}" for n in range(449, -1, -1)]
    assert {m.trajectory_id for m in marks(store, trajectory_ids=[*wanted, "none"])} == set(wanted)


def test_what_is_new_since_a_look_is_of_one_run_or_of_all(store: Store) -> None:
    run = store.begin_run("agent")
    store.save_trajectory(a_trajectory("t-1"), run_id=run)
    store.save_trajectory(a_trajectory("t-2"))
    seen = newest(store)
    assert changed(store, seen) == ([], seen)
    store.score("t-1", 0.25, author="ada")
    store.score("t-2", 0.25, author="ada")
    store.save_trajectory(a_trajectory("t-3"), run_id=run)
    found, now = changed(store, seen)
    assert set(found) == {"t-1", "t-2", "t-3"}
    assert set(changed(store, seen, run)[0]) == {"t-1", "t-3"}
    assert changed(store, now) == ([], now)
