"""Trajectories that a model's user starts and ends by hand, until they are trained on.

Invariant: a trajectory that ended stays collected until it was trained on, and afterwards is told from one
that never was.

`start` opens one and makes it the current one of its context, `end` collects it, `collected` is what there is
to train on, and `forget` lets go of what was trained on, which is in the record by then.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from art_core.errors import NothingToTrainError, RewardError, UnknownTrajectoryError
from art_core.gather import Gathered
from art_core.recording import Rollout, Sink, current_rollout, set_current_rollout
from art_core.types import Failure, RolloutStatus, Scenario, Trajectory, TrajectoryGroup


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

    def start(
        self,
        scenario: Scenario,
        *,
        sink: Sink,
        metadata: Mapping[str, Any] | None = None,
        max_calls: int | None = None,
    ) -> str:
        """Open a trajectory, make it the current one of this context, and return its id."""
        rollout = Rollout(scenario, sink=sink, metadata=metadata, max_calls=max_calls)
        with self._lock:
            self._open[rollout.id] = rollout
        set_current_rollout(rollout)
        return rollout.id

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

    def end(self, trajectory_id: str, reward: float | None, failure: str | None) -> Trajectory:
        """End an open trajectory with its reward, or as failed, and collect it.

        Raises:
            RewardError: neither a reward nor a failure was given, or the reward is not a finite number; the
                trajectory stays open.
            UnknownTrajectoryError: it was never started here, or has ended.
        """
        rollout = self.opened(trajectory_id)
        is_current = current_rollout() is rollout
        if (reward is None) == (failure is None):
            raise RewardError(
                f"trajectory {rollout.id} needs either reward=<number> or failure='<why there is none>'"
            )
        ended = rollout.finish(reward) if failure is None else rollout.fail(Failure("exception", failure))
        with self._lock:
            del self._open[rollout.id]
            self._ended[rollout.id] = ended.status
            self._collected[rollout.id] = ended
        if is_current:
            set_current_rollout(None)
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


def in_batches(trajectories: Sequence[Trajectory], size: int) -> list[list[TrajectoryGroup]]:
    """Every so many trajectories, in their order, as groups of one batch."""
    return [by_scenario(trajectories[i : i + size]) for i in range(0, len(trajectories), size)]


def by_scenario(trajectories: Sequence[Trajectory]) -> list[TrajectoryGroup]:
    """Trajectories as groups that are compared with each other, one of each scenario."""
    scenarios: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        scenarios.setdefault(trajectory.scenario.id, []).append(trajectory)
    return [TrajectoryGroup(members[0].scenario, tuple(members)) for members in scenarios.values()]


def require_scored(groups: Iterable[TrajectoryGroup]) -> None:
    """Refuse groups with members that neither failed nor have a reward, and rollouts of which none was kept.

    Raises:
        RewardError: there are such members; the message names them.
        NothingToTrainError: all groups were dropped for failed rollouts; the message says why those failed.
    """
    if isinstance(groups, Gathered) and groups.dropped and not groups:
        failed = groups.failed
        causes = Counter(t.failure.cause for t in failed if t.failure).most_common()
        first = next((t.failure.message for t in failed if t.failure), "unknown")
        raise NothingToTrainError(
            f"there is nothing to train on: all {len(groups.dropped)} groups were dropped, since too few of "
            f"their rollouts finished ({', '.join(f'{count} {cause}' for cause, count in causes)}); the "
            f"first failure: {first}"
        )
    missing = [t.id for g in groups for t in g if not t.failed and not _scored(t)]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise RewardError(
            f"{len(missing)} trajectories have no reward ({shown}): score them with with_reward(), "
            "or end them as failed"
        )


def _scored(trajectory: Trajectory) -> bool:
    return trajectory.reward is not None or bool(trajectory.step_rewards or trajectory.node_rewards)
