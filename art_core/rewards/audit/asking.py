"""Asking a reward function about runs, as they are or changed, and counting what that takes.

Invariant: what the function could not score is an error with its text, never a number.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from art_core.errors import RewardError
from art_core.rewards.audit.check import Checked
from art_core.rewards.audit.finding import Finding, Severity, share, to_read
from art_core.rewards.compose import Component, evaluate
from art_core.scoring import Reward, RewardFunction, wants_output
from art_core.types import Trajectory


@dataclass(frozen=True, slots=True)
class Asked:
    """What the function said of one run.

    Attributes:
        reward: None when it could not score it.
        error: why it could not.
    """

    trajectory: Trajectory
    reward: Reward | None
    error: str | None = None

    @property
    def value(self) -> float:
        """The reward of a run that was scored."""
        assert self.reward is not None, self.error
        return self.reward.total


class Asker:
    """Asks one reward function.

    Args:
        reward: the function.
        timeout: seconds for one run; None for no limit.
        concurrency: most runs at the same time.

    Attributes:
        calls: how often it was asked.

    Raises:
        RewardError: the function takes the wrong arguments.
    """

    def __init__(self, reward: RewardFunction, *, timeout: float | None, concurrency: int) -> None:
        wants_output(reward)
        self._reward = reward
        self._name = reward.name if isinstance(reward, Component) else ""
        self._timeout = timeout
        self._slots = asyncio.Semaphore(concurrency)
        self.calls = 0

    async def ask(self, trajectories: Sequence[Trajectory]) -> list[Asked]:
        """What it says of each run, in order; it does not see the rewards that they have."""
        return list(await asyncio.gather(*map(self._one, trajectories)))

    async def _one(self, trajectory: Trajectory) -> Asked:
        blank = replace(trajectory, reward=None, components={}, step_rewards={}, node_rewards={})
        async with self._slots:
            self.calls += 1
            try:
                output = trajectory.metadata.get("output")
                found = await evaluate(self._reward, self._name, blank, output, self._timeout)
            except RewardError as error:
                return Asked(trajectory, None, str(error))
        return Asked(trajectory, found)


def scored_again(asked: Sequence[Asked]) -> Checked:
    """Whether the function can score runs that have a reward, as they are.

    Args:
        asked: what it said of unchanged runs.
    """
    failed = [one for one in asked if one.reward is None]
    figures = {"asked": float(len(asked)), "unscored": float(len(failed))}
    if not failed:
        return Checked(figures=figures)
    error, _ = Counter(str(one.error) for one in failed).most_common(1)[0]
    finding = Finding(
        name="cannot_score_again",
        severity=Severity.CRITICAL if len(failed) == len(asked) else Severity.WARNING,
        message=f"the function cannot score {share(len(failed), len(asked))} recorded runs that have a "
        f"reward ({error[:200]})",
        fix="mend the function, or audit without it where it reads what is not recorded: a live environment, "
        "or what an agent returned and no metadata['output'] has kept",
        trajectories=to_read(one.trajectory.id for one in failed),
        figures=figures,
    )
    return Checked((finding,), figures)
