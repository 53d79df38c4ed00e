"""What a call of ``train`` is given: fresh groups, and some earlier ones once more.

Invariant: what is drawn depends on the seed, the version, the weights of rewards and what was kept, never on
timing; a group that is too old is forgotten, and a rollout that is too old is not trained.

Replayed groups keep the log-probabilities of the policy that sampled them, so the trainer's importance
weights account for their age.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from art_core.config import ReplayConfig
from art_core.rewards.reweighting import reweighted
from art_core.selection import Train, staleness
from art_core.types import Trajectory, TrajectoryGroup

MIN_SPREAD = 1e-6
"""Groups whose rewards spread less than this teach nothing and are not kept."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A group that may be trained again.

    Attributes:
        group: as it was scored, with its id, under which the store knows it.
        version: number of the policy version in training when it was trained first.
        spread: standard deviation of its rewards, under the weights in force.
    """

    group: TrajectoryGroup
    version: int
    spread: float

    def priority(self, version: int, half_life: float) -> float:
        """Weight in the draw: spread, halved every ``half_life`` versions."""
        return self.spread * 0.5 ** ((version - self.version) / half_life)


class ReplayBuffer:
    """Recent groups, drawn by how much they teach and how old they are.

    Args:
        config: how many, how old.
        seed: of the draws.
    """

    def __init__(self, config: ReplayConfig, *, seed: int = 0) -> None:
        self.config = config
        self._seed = seed
        self._kept: list[Kept] = []
        self._weights: Mapping[str, float] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """Tell what groups teach by rewards under other weights; see `reweighted`."""
        if weights != self._weights:
            self._weights = dict(weights)
            self._kept = [replace(k, spread=self._spread(k.group)) for k in self._kept]

    def _spread(self, group: TrajectoryGroup) -> float:
        return reward_spread(reweighted([group], self._weights).groups[0])

    def draw(self, version: int) -> list[TrajectoryGroup]:
        """Groups to train again, as they were scored, without repetition; fewer when fewer teach something.

        Args:
            version: number of the policy version in training.
        """
        self._forget(version)
        # Efraimidis & Spirakis 2006: the largest u^(1/w) are a weighted sample without replacement.
        dice = random.Random(f"{self._seed}/{version}")
        keyed = [
            (dice.random() ** (1 / max(k.priority(version, self.config.half_life), 1e-12)), i)
            for i, k in enumerate(self._kept)
            if k.spread > MIN_SPREAD
        ]
        return [self._kept[i].group for _, i in sorted(keyed, reverse=True)[: self.config.groups]]

    def add(self, groups: Sequence[TrajectoryGroup], version: int) -> None:
        """Keep those of the groups that teach something; the least useful ones make room."""
        known = {k.group.id for k in self._kept}
        for group in groups:
            spread = self._spread(group)
            if group.id and group.id not in known and spread > MIN_SPREAD:
                self._kept.append(Kept(group, version, spread))
        self._forget(version)
        if len(self._kept) > self.config.capacity:
            half_life = self.config.half_life
            best = sorted(self._kept, key=lambda k: -k.priority(version, half_life))[: self.config.capacity]
            chosen = {id(k) for k in best}
            self._kept = [k for k in self._kept if id(k) in chosen]

    def _forget(self, version: int) -> None:
        self._kept = [k for k in self._kept if version - k.version <= self.config.max_age]

    def state(self) -> list[dict[str, Any]]:
        """What is kept, as JSON; the groups themselves are in the store."""
        return [{"group": k.group.id, "version": k.version} for k in self._kept]

    def restore(self, state: Sequence[Mapping[str, Any]], lookup: Callable[[str], TrajectoryGroup]) -> None:
        """Keep what `state` said.

        Args:
            state: of the buffer that goes on here.
            lookup: a group by its id, as `Store.group` gives it.
        """
        self._kept = [
            Kept(group, item["version"], self._spread(group))
            for item in state
            for group in [lookup(item["group"])]
        ]


def reward_spread(group: TrajectoryGroup) -> float:
    """Standard deviation of a group's rewards; 0 for fewer than two."""
    rewards = group.rewards
    if len(rewards) < 2:
        return 0.0
    mean = sum(rewards) / len(rewards)
    return (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5


def fresh(
    groups: Sequence[TrajectoryGroup], version: int, max_staleness: int | None, train: Train = None
) -> tuple[list[TrajectoryGroup], Counter[str]]:
    """Groups without the rollouts that are too old.

    Args:
        groups: as they were collected.
        version: number of the policy version in training.
        max_staleness: versions that a rollout may be behind; None: any number.
        train: the user's choice among the steps; the others may be of any age.

    Returns:
        The groups, those that lost all their members left out, and how many rollouts were left out, by
        reason.
    """
    if max_staleness is None:
        return list(groups), Counter()
    left_out: Counter[str] = Counter()
    kept: list[TrajectoryGroup] = []
    for group in groups:
        young: list[Trajectory] = []
        for trajectory in group:
            age = staleness(trajectory, version, train)
            if age is not None and age > max_staleness:
                left_out[f"rollouts more than max_staleness={max_staleness} versions behind"] += 1
            else:
                young.append(trajectory)
        if young:
            kept.append(group if len(young) == len(group) else group.with_trajectories(young))
    return kept, left_out
