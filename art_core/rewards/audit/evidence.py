"""What an audit reads: groups of trajectories, and what can be told of each without asking anybody.

Invariant: every trajectory that was given is in exactly one group; only members with a reward count as
scored, and what a reward is compared with is read off the same member; no number is so large that its square,
or a sum of them, is none any more.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from art_core.errors import ConfigError
from art_core.rewards.sums import WEIGHT
from art_core.types import Trajectory, TrajectoryGroup

ANSWER_KEYS = ("answer", "expected", "solution", "target", "label", "reference", "ground_truth", "gold")
"""Where scenarios usually keep the right answer; looked for in metadata, then in inputs."""

LARGEST = 1e60
"""Larger numbers count as this one: the square of one of them times a weight is still a number."""


@dataclass(frozen=True)
class Evidence:
    """Groups under audit.

    Attributes:
        groups: all that was given.
        expected: key of the right answer in the scenarios; None: the first usual one that is there.
    """

    groups: tuple[TrajectoryGroup, ...]
    expected: str | None = None

    @cached_property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """All members of all groups."""
        return tuple(t for group in self.groups for t in group)

    @cached_property
    def scored(self) -> tuple[tuple[Trajectory, ...], ...]:
        """The scored members of every group that has two or more of them."""
        found = (group.scored for group in self.groups)
        return tuple(members for members in found if len(members) > 1)

    @cached_property
    def rewards(self) -> tuple[float, ...]:
        """All rewards that were given."""
        return tuple(t.reward for t in self.trajectories if t.reward is not None)

    def columns(self, value: Callable[[Trajectory], float | None]) -> list[list[tuple[float, float]]]:
        """Pairs of a value and the reward, by group; members without the value are left out."""
        found: list[list[tuple[float, float]]] = []
        for members in self.scored:
            pairs = [(value(t), reward_of(t)) for t in members]
            found.append([(x, y) for x, y in pairs if x is not None])
        return found

    def best(self, portion: float = 0.1) -> tuple[Trajectory, ...]:
        """Members that their group rewards most, best first: at most this share of all, at least three.

        A member counts only where its group tells members apart.
        """
        top: list[tuple[float, Trajectory]] = []
        for members in self.scored:
            values = [reward_of(t) for t in members]
            mean = sum(values) / len(values)
            top += [(reward_of(t) - mean, t) for t in members if reward_of(t) > mean + 1e-9]
        top.sort(key=lambda entry: -entry[0])
        count = max(3, round(portion * sum(len(members) for members in self.scored)))
        return tuple(t for _, t in top[:count])

    def expected_answers(self, trajectory: Trajectory) -> tuple[str, ...]:
        """What the scenario says the answer is, as texts; empty when it says nothing."""
        scenario = trajectory.scenario
        for key in (self.expected,) if self.expected is not None else ANSWER_KEYS:
            for place in (scenario.metadata, scenario.inputs):
                if key in place:
                    return _texts(place[key])
        return ()


def evidence(runs: Iterable[Trajectory] | Iterable[TrajectoryGroup], expected: str | None = None) -> Evidence:
    """Groups as they are; trajectories by their group, else by their scenario.

    Raises:
        ConfigError: something else was given.
    """
    groups: list[TrajectoryGroup] = []
    loose: dict[str, list[Trajectory]] = {}
    for run in cast("Iterable[object]", runs):
        if isinstance(run, TrajectoryGroup):
            groups.append(run)
        elif isinstance(run, Trajectory):
            loose.setdefault(run.group_id or f"scenario {run.scenario.id}", []).append(run)
        else:
            raise ConfigError(
                f"an audit reads trajectories or groups of them, got {type(run).__name__}: give what "
                "agather returned, or store.trajectories(run_id)"
            )
    for members in loose.values():
        groups.append(TrajectoryGroup(members[0].scenario, tuple(members), members[0].group_id or ""))
    return Evidence(tuple(g.with_trajectories([_bounded(t) for t in g]) for g in groups), expected)


def _bounded(trajectory: Trajectory) -> Trajectory:
    """A trajectory whose rewards, parts and weights can be multiplied and squared; nearly always itself."""
    t = trajectory
    weights = {name: value for name, value in t.metrics.items() if name.startswith(WEIGHT)}
    given = (t.components, weights, t.step_rewards, t.node_rewards)
    rewards = () if t.reward is None else (t.reward,)
    if all(abs(n) <= LARGEST for n in (*rewards, *(n for numbers in given for n in numbers.values()))):
        return t
    components, weights, step_rewards, node_rewards = (
        {name: _within(number) for name, number in numbers.items()} for numbers in given
    )
    return replace(
        t,
        reward=None if t.reward is None else _within(t.reward),
        components=components,
        metrics={**t.metrics, **weights},
        step_rewards=step_rewards,
        node_rewards=node_rewards,
    )


def _within(number: float) -> float:
    return max(-LARGEST, min(LARGEST, number))


def reward_of(trajectory: Trajectory) -> float:
    """The reward of a member that has one."""
    assert trajectory.reward is not None, trajectory.id
    return trajectory.reward


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ()
    if isinstance(value, str | int | float):
        return (str(value),)
    if isinstance(value, Sequence):
        return tuple(text for one in cast("Sequence[Any]", value) for text in _texts(one))
    return ()
