"""Whatever the types allow is read back as it was written, from the store and from JSON lines."""

import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.round_trip import assert_recorded_is_read_back, assert_saved_is_read_back
from helpers.trajectories import a_span, a_step, a_trajectory, trajectories
from hypothesis import given, settings
from hypothesis import strategies as st

from art_core.jsonl import dump_trajectory, load_trajectory
from art_core.recording import Rollout
from art_core.store import Store
from art_core.types import Scenario, Trajectory, TrajectoryGroup


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as root, Store.open("any", root) as store:
        yield store


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_trajectory_saved_is_read_back_equal(store: Store, data: st.DataObject) -> None:
    assert_saved_is_read_back(store, data.draw(trajectories()))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_trajectory_recorded_piece_by_piece_is_read_back_equal(store: Store, data: st.DataObject) -> None:
    assert_recorded_is_read_back(store, data.draw(trajectories()))


@settings(deadline=None, max_examples=60)
@given(trajectories())
def test_any_trajectory_as_a_line_and_back_is_equal_and_gives_the_same_line(trajectory: Trajectory) -> None:
    line = dump_trajectory(trajectory)
    assert "\n" not in line
    assert load_trajectory(line) == trajectory
    assert dump_trajectory(load_trajectory(line)).encode() == line.encode()


def test_spans_are_kept_with_the_rollouts_end_and_late_ones_after_it(store: Store) -> None:
    rollout = Rollout(sink=store.sink())
    rollout.add_span(a_span(1))
    ended = rollout.finish(1.0)
    assert store.trajectory(rollout.id) == ended
    rollout.add_span(a_span(0, status="cancelled"))  # a background task that outlived its graph
    store.begin_run("barrier")  # the writer writes in order
    assert store.trajectory(rollout.id).spans == (a_span(0, status="cancelled"), a_span(1))
    store.save_trajectory(ended)
    assert len(store.trajectory(rollout.id).spans) == 2, "saving adds what is new, and takes nothing away"


def test_a_span_that_arrives_while_the_end_is_being_written_is_kept(store: Store) -> None:
    class Slow(type(store.sink())):
        def end(self, trajectory):
            rollout.add_span(a_span(2))
            return super().end(trajectory)

    sink = store.sink()
    sink.__class__ = Slow
    rollout = Rollout(sink=sink)
    rollout.add_span(a_span(1))
    rollout.finish(1.0)
    store.begin_run("barrier")
    assert store.trajectory(rollout.id).spans == (a_span(1), a_span(2))


def test_a_span_that_json_cannot_hold_is_kept_readable_and_does_not_keep_its_rollout_open(
    store: Store,
) -> None:
    circle: dict[str, object] = {}
    circle["itself"] = circle
    rollout = Rollout(sink=store.sink())
    rollout.add_span(a_span(1, inputs=circle, outputs={(0, 1): "x"}))
    rollout.finish(1.0)
    (span,) = store.trajectory(rollout.id).spans
    assert (span.inputs, span.outputs) == ("{'itself': {...}}", "{(0, 1): 'x'}")


def test_trajectories_without_steps_come_without_spans_too(store: Store) -> None:
    store.save_trajectory(a_trajectory("t-light", spans=(a_span(),), scenario=Scenario("light")))
    (light,) = store.trajectories(scenario_id="light", with_steps=False)
    assert (light.steps, light.spans) == ((), ())


def test_scenario_inputs_that_are_not_json_are_kept_readable(store: Store) -> None:
    class Board:
        def __repr__(self) -> str:
            return "Board(3x3)"

    inputs = {"board": Board(), "where": Path("a/b"), "pair": (1, 2)}
    trajectory = a_trajectory("t-board", scenario=Scenario("s", inputs))
    store.save_trajectory(trajectory)
    kept = store.trajectory("t-board").scenario.inputs
    assert kept["board"]["repr"] == "Board(3x3)"
    assert kept["board"]["type"].endswith("Board")
    assert (kept["where"], kept["pair"]) == ("a/b", [1, 2])


def test_scenarios_with_one_id_and_different_content_stay_apart(store: Store) -> None:
    first, second = Scenario("same", {"n": 1}), Scenario("same", {"n": 2})
    store.save_trajectory(a_trajectory("t-first", scenario=first))
    store.save_trajectory(a_trajectory("t-second", scenario=second))
    assert [t.scenario for t in store.trajectories(scenario_id="same")] == [first, second]


def test_a_long_conversation_costs_its_length_and_not_its_square(tmp_path: Path) -> None:
    def size(turns: int) -> int:
        with Store.open(f"turns{turns}", tmp_path) as store:
            store.save_group(TrajectoryGroup(Scenario("s"), (conversation(turns),), "g"))
        return (tmp_path / f"turns{turns}.db").stat().st_size

    empty, short, long = size(0), size(20), size(80)
    assert (long - empty) < 7 * (short - empty)  # four times the turns; squared it would be 16 times


def conversation(turns: int) -> Trajectory:
    """Each turn's prompt is all that was said before, in words and in tokens that don't compress."""
    rng = random.Random(turns)
    said: list[dict[str, str]] = []
    prompt: tuple[int, ...] = ()
    steps = []
    for turn in range(turns):
        said.append({"role": "user", "content": rng.randbytes(300).hex()})
        prompt += tuple(rng.randrange(150_000) for _ in range(200))
        base = a_step("t-talk", turn)
        assert base.tokens is not None
        steps.append(
            replace(base, messages=tuple(dict(m) for m in said), tokens=replace(base.tokens, prompt=prompt))
        )
    return (
        a_trajectory("t-talk", steps=0) if not turns else replace(a_trajectory("t-talk"), steps=tuple(steps))
    )
