"""Advantages: how much better a rollout was than its group.

Invariant: a rollout without a reward is not in any baseline, and a group whose rewards differ only by
float noise has no advantages at all.
"""

import math
from collections.abc import Sequence

from art_core.capture import superseded
from art_core.selection import returns
from art_core.types import TrajectoryGroup

MIN_SPREAD = 1e-6
"""Rewards of a group that lie closer together than this are equal."""


def group_advantages(rewards: Sequence[float], *, std: bool = False) -> list[float] | None:
    """Rewards relative to their group's mean (GRPO; Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    ``A_i = r_i - mean(r)``, divided by the standard deviation of the group when ``std`` is set. Without
    the division, easy and hard scenarios weigh the same (Dr. GRPO; Liu et al. 2025, arXiv:2503.20783).
    Sums are exact, so that the order of the members does not matter.

    Args:
        rewards: of the members that have one  [members].
        std: divide by the (population) standard deviation.

    Returns:
        Advantages  [members]; None when the rewards spread less than `MIN_SPREAD`, as for groups of
        one or none: such a group teaches nothing.
    """
    if not rewards or max(rewards) - min(rewards) < MIN_SPREAD:
        return None
    mean = math.fsum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    if not std:
        return centred
    scale = math.sqrt(math.fsum(c * c for c in centred) / len(centred))
    return [c / scale for c in centred]


def step_advantages(group: TrajectoryGroup, *, std: bool = False) -> dict[str, dict[str, float]]:
    """Advantages of a group's steps, by trajectory and step.

    Computed once for each rollout and given to all its steps. Where rewards were given to steps or
    nodes, each step is compared with the steps of the same node in the group instead, those aside that a
    later attempt superseded.

    Args:
        group: its members' rewards; failed and unscored members take no part.
        std: divide by the standard deviation.

    Returns:
        Advantages by trajectory id, then step id. Empty when the rewards have no spread.
    """
    if any(t.step_rewards or t.node_rewards for t in group if not t.failed):
        return _advantages_by_node(group, std=std)
    values = group_advantages(group.rewards, std=std)
    if values is None:
        return {}
    return {t.id: {s.id: a for s in t.steps} for t, a in zip(group.scored, values, strict=True)}


def _advantages_by_node(group: TrajectoryGroup, *, std: bool) -> dict[str, dict[str, float]]:
    credits: dict[str | None, list[tuple[str, str, float]]] = {}
    for trajectory in group:
        earned = returns(trajectory)
        replaced = superseded(trajectory.steps)
        for step in trajectory.steps:
            if step.id in earned and step.id not in replaced:
                credits.setdefault(step.identity.node, []).append((trajectory.id, step.id, earned[step.id]))
    found: dict[str, dict[str, float]] = {}
    for steps in credits.values():
        values = group_advantages([earned for _, _, earned in steps], std=std)
        for (trajectory_id, step_id, _), advantage in zip(steps, values or [], strict=False):
            found.setdefault(trajectory_id, {})[step_id] = advantage
    return found
