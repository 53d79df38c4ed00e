"""Preferences: people's pairwise choices within a group, and the rewards that they make.

Invariant: no reward is invented. Only members that people compared have one, and only members that hang
together by comparisons are put on one scale; the others are left out, with why.

Choices -> wins and ties between members -> strengths by Bradley and Terry's model, in which i beats j with
probability ``p_i / (p_i + p_j)`` -> rewards from 0 to 1: the chance of beating a member of middling strength.

The strengths are found by the MM algorithm (Hunter 2004, "MM algorithms for generalized Bradley-Terry
models", Annals of Statistics 32, eq. 3). A tie is half a win for both. Everybody also wins and loses `PRIOR`
times against an invisible member of strength 1 (a penalised likelihood, as in Caron and Doucet 2012,
arXiv:1011.1761), so that who never lost stays finite, and more so the less is known.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from art_core.errors import RewardError
from art_core.rewards.judgement import Scores
from art_core.rewards.labels import Preference
from art_core.scoring import Reward
from art_core.types import Trajectory, TrajectoryGroup

PRIOR = 0.5
"""Wins, and losses, of everybody against the invisible member."""
TOLERANCE = 1e-10
ROUNDS = 10_000

AUTHOR = "preferences"
"""Who gives the rewards, in their history."""
COMPONENT = "preferred"
"""Their name among a reward's components, and of the entry in a trajectory's metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRewards:
    """What people's choices are worth for one group.

    Attributes:
        rewards: by trajectory id, from 0 to 1: the chance of being preferred to a middling member of the
        group.
        left_out: members without a reward, with the reason.
        choices: that were counted, ties included.
        apart: sets of members that were compared among themselves, and never with those that have rewards.
    """

    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    choices: int = 0
    apart: tuple[frozenset[str], ...] = ()

    def reward(self, trajectory_id: str) -> Reward:
        """One trajectory's reward.

        Raises:
            RewardError: it has none; the message says why.
        """
        value = self.rewards.get(trajectory_id)
        if value is None:
            why = self.left_out.get(trajectory_id, "it is not of the group")
            raise RewardError(f"trajectory {trajectory_id} has no reward by preferences: {why}")
        return Reward(value, {COMPONENT: value})

    def apply(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """The group with these rewards; members without one say why in their metadata."""
        return group.with_trajectories([self._applied(member) for member in group])

    def save(self, store: Scores, group: TrajectoryGroup) -> TrajectoryGroup:
        """`apply`, and give each new reward to the store's history.

        Raises:
            UnknownTrajectoryError: the store lacks a member.
        """
        applied = self.apply(group)
        for member in applied:
            if member.reward is not None:
                store.score(
                    member.id,
                    member.reward,
                    components=member.components,
                    author=AUTHOR,
                    explanation=f"{self.choices} choices in its group",
                )
        return applied

    def _applied(self, member: Trajectory) -> Trajectory:
        value = self.rewards.get(member.id)
        if value is None:
            why = self.left_out.get(member.id)
            if why is None:
                raise RewardError(f"trajectory {member.id} is not of the group whose choices these are")
            return replace(member, reward=None, metadata={**member.metadata, COMPONENT: {"unscored": why}})
        return replace(
            member.with_reward(value, components={**member.components, COMPONENT: value}),
            metadata={**member.metadata, COMPONENT: {"score": value}},
        )


def preference_rewards(group: TrajectoryGroup, preferences: Iterable[Preference]) -> PreferenceRewards:
    """Rewards for a group from people's choices between its members.

    Args:
        group: its members.
        preferences: choices (`labels_of`); those that are not between two members are passed over.
    """
    usable = {t.id for t in group if not t.failed}
    ours = [p for p in preferences if p.better in usable and p.worse in usable and p.better != p.worse]
    sets = connected(ours)
    left_out = {t.id: "it failed" if t.failed else "nobody compared it with another member" for t in group}
    if not sets:
        return PreferenceRewards(left_out=left_out)
    largest, *apart = sets
    within = [p for p in ours if p.better in largest]
    found = strengths(within)
    middle = math.fsum(found.values()) / len(found)
    rewards = {name: 1 / (1 + math.exp(middle - strength)) for name, strength in found.items()}
    for other in apart:
        why = "it was compared with others, but by no chain of choices with the members that have rewards"
        left_out |= dict.fromkeys(other, why)
    return PreferenceRewards(
        rewards={t.id: rewards[t.id] for t in group if t.id in rewards},
        left_out={name: why for name, why in left_out.items() if name not in rewards},
        choices=len(within),
        apart=tuple(apart),
    )


def connected(preferences: Sequence[Preference]) -> list[frozenset[str]]:
    """The sets of names that hang together by choices, the largest first, else in order of appearance."""
    sets: list[set[str]] = []
    for one in preferences:
        joined = {one.better, one.worse}
        apart: list[set[str]] = []
        for other in sets:
            if other & joined:
                joined = other | joined
            else:
                apart.append(other)
        sets = [*apart, joined]
    order = {name: i for i, p in reversed([*enumerate(preferences)]) for name in (p.better, p.worse)}
    sets.sort(key=lambda names: (-len(names), min(order[name] for name in names)))
    return [frozenset(names) for names in sets]


def strengths(preferences: Iterable[Preference], prior: float = PRIOR) -> dict[str, float]:
    """Log-strengths in Bradley and Terry's model: i beats j with probability ``sigmoid(s_i - s_j)``.

    Args:
        preferences: choices; a tie is half a win for both.
        prior: wins, and losses, of everybody against a member of strength 0. With 0, whoever never lost would
            be infinitely strong.

    Returns:
        By name; in the order of first appearance.

    Raises:
        RewardError: the prior is not above 0.
    """
    if not prior > 0:
        raise RewardError(f"prior={prior!r}: expected more than 0, or strengths have no bound")
    wins: dict[str, float] = {}
    met: dict[str, dict[str, int]] = {}
    for one in preferences:
        for name, other in ((one.better, one.worse), (one.worse, one.better)):
            share = 0.5 if one.tie else float(name == one.better)
            wins[name] = wins.get(name, 0.0) + share
            against = met.setdefault(name, {})
            against[other] = against.get(other, 0) + 1
    power = dict.fromkeys(wins, 1.0)
    for _ in range(ROUNDS):
        moved = 0.0
        for name, won in wins.items():
            expected = math.fsum(n / (power[name] + power[other]) for other, n in met[name].items())
            new = (won + prior) / (expected + 2 * prior / (power[name] + 1.0))
            moved = max(moved, abs(math.log(new / power[name])))
            power[name] = new
        if moved < TOLERANCE:
            break
    return {name: math.log(value) for name, value in power.items()}
