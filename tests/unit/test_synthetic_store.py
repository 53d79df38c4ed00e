"""The made-up store that pages are tested with looks like a recorded one."""

from pathlib import Path

from helpers.synthetic_store import fill

from art_core.store import Store


def test_calls_and_spans_of_a_rollout_lie_in_its_time(tmp_path: Path) -> None:
    with Store.open("p", tmp_path) as store:
        fill(store, run_count=1, rollouts=8, train_steps=2)
        for trajectory in store.trajectories():
            assert trajectory.spans
            for one in (*trajectory.steps, *trajectory.spans):
                assert trajectory.started_at <= one.started_at < trajectory.started_at + 5
