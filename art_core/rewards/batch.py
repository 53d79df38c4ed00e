"""Many trajectories scored at once, after the fact: another reward over what was already run.

Invariant: order and number stay as they were; what cannot be scored has no reward, and says why.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from art_core.errors import ConfigError, RewardError
from art_core.judgings import JUDGINGS, keeping
from art_core.rewards.compose import Component, evaluate
from art_core.rewards.sums import PARTS, without_weights
from art_core.scoring import RewardFunction, wants_output
from art_core.sync import run_sync
from art_core.types import Failure, RolloutStatus, Trajectory, TrajectoryGroup


async def ascore_trajectories(
    reward: RewardFunction,
    trajectories: Iterable[Trajectory],
    *,
    outputs: Sequence[object] | None = None,
    concurrency: int = 64,
    timeout: float | None = None,
) -> list[Trajectory]:
    """Score trajectories that have ended; the rewards that they had are replaced.

    Args:
        reward: a component or a plain function.
        trajectories: failed ones come back as they are.
        outputs: what the agent returned, one for each trajectory; None: ``metadata["output"]``, where
            rollouts keep it.
        concurrency: most trajectories at the same time.
        timeout: seconds for one trajectory; None for no limit.

    Returns:
        The trajectories in their order. Those that the reward could not score are failed, without a
        reward, with the cause ``reward``.

    Raises:
        ConfigError: an argument is out of range, outputs and trajectories differ in number, or something
            else than trajectories was given.
        RewardError: the reward function takes the wrong arguments.
    """
    waiting = _trajectories(trajectories)
    if concurrency < 1:
        raise ConfigError(f"concurrency={concurrency}: expected at least 1")
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"timeout={timeout!r}: expected seconds above 0")
    if outputs is not None and len(outputs) != len(waiting):
        raise ConfigError(f"{len(outputs)} outputs for {len(waiting)} trajectories; give one for each")
    given = [t.metadata.get("output") for t in waiting] if outputs is None else outputs
    wants_output(reward)
    name = reward.name if isinstance(reward, Component) else ""
    slots = asyncio.Semaphore(concurrency)

    async def one(trajectory: Trajectory, output: object) -> Trajectory:
        if trajectory.failed:
            return trajectory
        blank = replace(trajectory, reward=None, components={}, step_rewards={}, node_rewards={})
        async with slots:
            kept = keeping()
            try:
                found = await evaluate(reward, name, blank, output, timeout)
            except RewardError as error:
                failure = Failure("reward", str(error), "art_core.errors.RewardError")
                return replace(_with(blank, kept), status=RolloutStatus.FAILED, failure=failure)
        scored = _with(blank, kept)
        return replace(
            scored,
            reward=found.total,
            components=found.components,
            step_rewards=found.by_step,
            node_rewards=found.by_node,
            metrics={**without_weights(trajectory.metrics), **found.metrics},
            metadata={**scored.metadata, **found.metadata},
        )

    return list(await asyncio.gather(*(one(t, o) for t, o in zip(waiting, given, strict=True))))


def _trajectories(given: object) -> list[Trajectory]:
    if isinstance(given, Trajectory):
        raise ConfigError("one trajectory was given to be scored, expected several: put it into a list")
    found: list[Any] = list(cast("Iterable[Any]", given))
    for one in found:
        if isinstance(one, TrajectoryGroup):
            raise ConfigError(
                "groups were given to be scored, expected trajectories: [t for group in groups for t in "
                "group], or one group, whose members come back for group.with_trajectories(...)"
            )
        if not isinstance(one, Trajectory):
            raise ConfigError(f"{type(one).__name__} was given to be scored, expected a trajectory")
    return found


def _with(trajectory: Trajectory, judgings: Sequence[Mapping[str, Any]]) -> Trajectory:
    """A trajectory with what judges took now, in place of what was kept with the reward that it had."""
    rest = {name: value for name, value in trajectory.metadata.items() if name not in (JUDGINGS, PARTS)}
    return replace(trajectory, metadata={**rest, JUDGINGS: list(judgings)} if judgings else rest)


def score_trajectories(
    reward: RewardFunction,
    trajectories: Iterable[Trajectory],
    *,
    outputs: Sequence[object] | None = None,
    concurrency: int = 64,
    timeout: float | None = None,
) -> list[Trajectory]:
    """`ascore_trajectories` from sync code; same arguments, result and errors."""
    return run_sync(
        lambda: ascore_trajectories(
            reward, trajectories, outputs=outputs, concurrency=concurrency, timeout=timeout
        )
    )
