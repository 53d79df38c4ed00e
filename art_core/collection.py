"""Trajectories that a model's user starts and ends by hand, until they are trained on.

Invariant: a trajectory that ended stays collected until it was trained on, and afterwards is told from one
that never was.

`add` opens one, `end` collects it, `collected` is what there is to train on, and `forget` lets go of what was
trained on, which is in the record by then.
"""

import threading
from collections.abc import Iterable, Sequence

from art_core.errors import RewardError, UnknownTrajectoryError
from art_core.recording import Rollout
from art_core.types import Failure, RolloutStatus, Trajectory, TrajectoryGroup


class Collection:
    """The trajectories of one model; thread-safe.

    Args:
        model: the model's name, for errors.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._open: dict[str, Rollout] = {}
        self._ended: dict[str, RolloutStatus] = {}
        self._collected: dict[str, Trajectory] = {}

    def add(self, rollout: Rollout) -> None:
        """Keep an open trajectory."""
        with self._lock:
            self._open[rollout.id] = rollout

    def opened(self, trajectory_id: str) -> Rollout:
        """The open trajectory with this id.

        Raises:
            UnknownTrajectoryError: it was never started here, or has ended.
        """
        with self._lock:
            rollout = self._open.get(trajectory_id)
            ended = self._ended.get(trajectory_id)
        if rollout is not None:
            return rollout
        if ended is not None:
            raise UnknownTrajectoryError(
                f"trajectory {trajectory_id} has ended already ({ended}); start a new one"
            )
        raise UnknownTrajectoryError(
            f"model {self._model!r} started no trajectory {trajectory_id!r}; start_trajectory() gives ids"
        )

    def end(self, rollout: Rollout, reward: float | None, failure: str | None) -> Trajectory:
        """End an open trajectory with its reward, or as failed, and collect it.

        Raises:
            RewardError: neither a reward nor a failure was given, or the reward is not a finite number; the
                trajectory stays open.
        """
        if (reward is None) == (failure is None):
            raise RewardError(
                f"trajectory {rollout.id} needs either reward=<number> or failure='<why there is none>'"
            )
        ended = rollout.finish(reward) if failure is None else rollout.fail(Failure("exception", failure))
        with self._lock:
            del self._open[rollout.id]
            self._ended[rollout.id] = ended.status
            self._collected[rollout.id] = ended
        return ended

    def now(self, trajectory_id: str) -> Trajectory | None:
        """A trajectory as it is now, open or collected; None when it was trained on.

        Raises:
            UnknownTrajectoryError: it was never started here.
        """
        with self._lock:
            collected = self._collected.get(trajectory_id)
            trained = collected is None and trajectory_id in self._ended
        if collected is not None or trained:
            return collected
        return self.opened(trajectory_id).snapshot()

    def collected(self) -> list[Trajectory]:
        """What ended and was not trained on, in the order in which it ended."""
        with self._lock:
            return list(self._collected.values())

    def forget(self, trained: Iterable[Trajectory]) -> None:
        """Let go of what was trained on."""
        with self._lock:
            for trajectory in trained:
                self._collected.pop(trajectory.id, None)


def by_scenario(trajectories: Sequence[Trajectory]) -> list[TrajectoryGroup]:
    """Trajectories as groups that are compared with each other, one of each scenario."""
    scenarios: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        scenarios.setdefault(trajectory.scenario.id, []).append(trajectory)
    return [TrajectoryGroup(members[0].scenario, tuple(members)) for members in scenarios.values()]
