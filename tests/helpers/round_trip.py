"""Trajectories into a store and back, on whichever database it is."""

from dataclasses import replace
from itertools import count

from art_core.store import Store
from art_core.types import RolloutStatus, Trajectory

_count = count()


def under_new_ids(trajectory: Trajectory) -> Trajectory:
    """The same under ids that no store has seen."""
    new = f"t-{next(_count)}"
    steps = tuple(replace(s, id=f"{new}-{n}", rollout_id=new) for n, s in enumerate(trajectory.steps))
    return replace(trajectory, id=new, steps=steps)


def assert_saved_is_read_back(store: Store, drawn: Trajectory) -> None:
    """Saved whole."""
    trajectory = under_new_ids(drawn)
    store.save_trajectory(trajectory)
    assert store.trajectory(trajectory.id) == trajectory


def assert_recorded_is_read_back(store: Store, drawn: Trajectory) -> None:
    """Recorded piece by piece, as while a rollout runs."""
    trajectory = under_new_ids(drawn)
    sink = store.sink()
    sink.begin(
        replace(trajectory, steps=(), status=RolloutStatus.RUNNING, reward=None, failure=None)
    ).result()
    for step in trajectory.steps:
        sink.append(step).result()
    sink.end(trajectory).result()
    assert store.trajectory(trajectory.id) == trajectory
