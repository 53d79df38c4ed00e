"""Reweighting: rewards as other weights of their components would have made them.

Invariant: a group is reweighted as a whole or left as it was scored, since its members are compared with each
other; a trajectory that was reweighted holds what its components would have made of it under those weights
from the start; no component is asked again.

Only the weights of the outermost sum can be put in place of others: the total is linear in those and in no
others. `sums` recorded them beside the raw values. What cannot be reweighted is told of with its reason.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from art_core.errors import ConfigError
from art_core.rewards.sums import WEIGHT, component_weights, parts_on_record, scale_of, weighted
from art_core.scoring import Reward
from art_core.types import Trajectory, TrajectoryGroup

NO_SUM = "a reward that is no weighted sum of components (a plain number, or one that a person or judge gave)"
"""Why a group is left as it was scored."""

IN_PARTS = "rewards of single steps or nodes that no weighted sum on record made"
"""Why a group is left as it was scored."""


@dataclass(frozen=True, slots=True)
class Reweighted:
    """Groups under other weights.

    Attributes:
        groups: all of them, in their order.
        changed: how many of them were reweighted.
        as_scored: how many groups were left as they were, by reason.
        unknown: why a name could not be used anywhere, by name.
    """

    groups: tuple[TrajectoryGroup, ...]
    changed: int
    as_scored: Mapping[str, int]
    unknown: Mapping[str, str]


def reweighted(groups: Iterable[TrajectoryGroup], weights: Mapping[str, float]) -> Reweighted:
    """Rewards with other weights in place of those that their components had.

    A weight has the meaning that it has in ``0.7 * quality - 0.01 * Steps()``; where the sum was `Adaptive`,
    it is divided by the same running spread as the recorded one.

    Args:
        groups: scored; failed members stay as they are.
        weights: by name of a component of the outermost sum; the others keep theirs.

    Returns:
        The groups, and what could not be done: a name may be unknown to all of them, and a group may hold
        rewards that are no weighted sums.

    Raises:
        ConfigError: a weight is not a finite number, or something else than groups was given.
        RewardError: a reward would not be finite under these weights.
    """
    given = tuple(groups)
    for group in given:
        if not isinstance(cast(object, group), TrajectoryGroup):
            raise ConfigError(f"reweighted takes groups, got {type(group).__name__}; put one into a list")
    for name, weight in weights.items():
        number = isinstance(cast(object, weight), int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight):
            raise ConfigError(f"weight of component {name!r} is {weight!r}; expected a finite number")
    if not weights:
        return Reweighted(given, 0, {}, {})
    made: list[TrajectoryGroup] = []
    changed = 0
    as_scored: Counter[str] = Counter()
    for group in given:
        obstacle = next((why for t in group if (why := _obstacle(t)) is not None), None)
        if obstacle is not None:
            as_scored[obstacle] += 1
            made.append(group)
            continue
        members = [_under(t, weights) for t in group]
        turned = any(new is not old for new, old in zip(members, group, strict=True))
        changed += turned
        made.append(group.with_trajectories(members) if turned else group)
    return Reweighted(tuple(made), changed, as_scored, _unknown(given, weights))


def _obstacle(trajectory: Trajectory) -> str | None:
    """Why a trajectory cannot be reweighted; None when it can, or has no reward at all."""
    in_parts = bool(trajectory.step_rewards or trajectory.node_rewards)
    if trajectory.reward is None:
        return IN_PARTS if in_parts else None
    weights = component_weights(trajectory)
    found = _weighted(trajectory, weights)
    if not weights or not _same(found.total, trajectory.reward):
        return NO_SUM
    known = {step.id for step in trajectory.steps}
    steps = {step: reward for step, reward in trajectory.step_rewards.items() if step in known}
    again = {step: reward for step, reward in found.by_step.items() if step in known}
    if not _same_by_name(again, steps) or not _same_by_name(found.by_node, trajectory.node_rewards):
        return IN_PARTS
    return None


def _weighted(trajectory: Trajectory, weights: Mapping[str, float]) -> Reward:
    """What the recorded components make under these weights; NaN where they are too large to be added."""
    parts, events = parts_on_record(trajectory, weights)
    nodes = {step.id: step.identity.node for step in trajectory.steps}
    try:
        return weighted(parts, weights, nodes, events=events)
    except (OverflowError, ValueError):
        return Reward(math.nan)


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6)


def _same_by_name(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())


def _under(trajectory: Trajectory, weights: Mapping[str, float]) -> Trajectory:
    recorded = component_weights(trajectory)
    turned = {name: weights[name] / scale_of(trajectory, name) for name in recorded if name in weights}
    if trajectory.reward is None or all(turned[name] == recorded[name] for name in turned):
        return trajectory
    found = _weighted(trajectory, {**recorded, **turned})
    return replace(
        trajectory,
        reward=found.total,
        step_rewards=found.by_step,
        node_rewards=found.by_node,
        metrics={**trajectory.metrics, **{f"{WEIGHT}{name}": w for name, w in turned.items()}},
    )


def _unknown(groups: Sequence[TrajectoryGroup], weights: Mapping[str, float]) -> dict[str, str]:
    """Names that no trajectory has a weight of, and why."""
    scored = [t for group in groups for t in group if not t.failed]
    known = {name for t in scored for name in component_weights(t)}
    parts = {name for t in scored for name in t.components}
    told: dict[str, str] = {}
    for name in weights:
        if name in known:
            continue
        whole = next((n for n in sorted(known) if name.startswith(f"{n}/")), None)
        if whole is not None and name in parts:
            told[name] = f"it is a part of {whole!r}, which is weighed as a whole"
        elif name in parts:
            told[name] = "it was recorded without a weight: it is in no sum, or inside of one"
        else:
            there = ", ".join(map(repr, sorted(known))) or "none"
            told[name] = f"no rollout has such a component; those with a weight are {there}"
    return told


def weights_to_turn(trajectory: Trajectory) -> dict[str, float]:
    """The weights that `reweighted` can put others in place of, by component, as they stood in the sum.

    Empty for a trajectory that it leaves as it was scored.
    """
    if trajectory.reward is None or _obstacle(trajectory) is not None:
        return {}
    return {
        name: weight * scale_of(trajectory, name) for name, weight in component_weights(trajectory).items()
    }
