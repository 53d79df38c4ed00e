"""The weighted sum of rewards: of the whole, of every part, of every step and node.

Invariant: the total is the sum of the recorded values times the recorded weights, and nothing that was
recorded is lost or overwritten.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from art_core.errors import RewardError
from art_core.scoring import Reward
from art_core.types import Trajectory

WEIGHT = "weight/"
"""Before a component's name: the metric that is its weight in the sum."""

SCALE = "scale/"
"""Before a component's name: the metric that its weight was divided by (`adaptive`); absent: by nothing."""

PARTS = "reward_parts"
"""Key of a trajectory's metadata: what single steps and nodes were worth to each component of the sum."""


def component_weights(trajectory: Trajectory) -> dict[str, float]:
    """The weights of the components of a trajectory's outermost sum, by name; empty where none can be told.

    Where none were recorded, components that add up to the reward count once each; parts of them
    (``<component>/<part>``) are counted with them.
    """
    told = {
        name: trajectory.metrics[f"{WEIGHT}{name}"]
        for name in trajectory.components
        if f"{WEIGHT}{name}" in trajectory.metrics
    }
    if told or trajectory.reward is None:
        return told
    whole = {
        name: value
        for name, value in trajectory.components.items()
        if not any(name.startswith(f"{other}/") for other in trajectory.components)
    }
    if not math.isclose(sum(whole.values()), trajectory.reward, rel_tol=1e-6, abs_tol=1e-6):
        return {}
    return dict.fromkeys(whole, 1.0)


def scale_of(trajectory: Trajectory, name: str) -> float:
    """What the weight of a component was divided by."""
    return trajectory.metrics.get(f"{SCALE}{name}", 1.0)


def without_weights(metrics: Mapping[str, float]) -> dict[str, float]:
    """A trajectory's metrics without what a sum recorded there, before another one records its own."""
    return {name: value for name, value in metrics.items() if not name.startswith((WEIGHT, SCALE))}


def combined(
    parts: Mapping[str, Reward], weights: Mapping[str, float], trajectory: Trajectory, *, events: bool = False
) -> Reward:
    """The weighted sum of what components said, with every raw value and weight.

    Args:
        parts: rewards by component; each names its parts already.
        weights: one for each of them.
        trajectory: what was scored.
        events: see `Composed`.

    Raises:
        RewardError: two of them recorded something under the same name.
    """
    components: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for name, part in parts.items():
        for kept, new in (
            (components, part.components),
            (metrics, {**part.metrics, f"{WEIGHT}{name}": weights[name]}),
        ):
            if twice := next((key for key in new if key in kept), None):
                raise RewardError(f"two components recorded {twice!r}; rename one with named()")
            kept.update(new)

    found = weighted(parts, weights, {s.id: s.identity.node for s in trajectory.steps}, events=events)
    return replace(found, components=components, metrics=metrics, metadata=_in_parts(parts, events))


def weighted(
    parts: Mapping[str, Reward],
    weights: Mapping[str, float],
    nodes: Mapping[str, str | None],
    *,
    events: bool = False,
) -> Reward:
    """The weighted sum alone: of the whole, of every part, of every step and node.

    Args:
        parts: rewards by component.
        weights: one for each of them.
        nodes: of the trajectory's steps, by step id.
        events: see `Composed`.
    """

    def at_node(part: Reward, node: str | None) -> float:
        return part.by_node.get(node or "", 0.0 if events else part.total)

    def at_step(part: Reward, step: str) -> float:
        earned = 0.0 if events else at_node(part, nodes.get(step))
        return part.by_step.get(step, earned)

    def total(value: Callable[[Reward], float]) -> float:
        return math.fsum(weights[name] * value(part) for name, part in parts.items())

    rewarded_steps = dict.fromkeys(step for part in parts.values() for step in part.by_step)
    rewarded_nodes = dict.fromkeys(node for part in parts.values() for node in part.by_node)
    return Reward(
        total(lambda part: part.total),
        by_node={node: total(lambda part, node=node: at_node(part, node)) for node in rewarded_nodes},
        by_step={step: total(lambda part, step=step: at_step(part, step)) for step in rewarded_steps},
    )


def _in_parts(parts: Mapping[str, Reward], events: bool) -> dict[str, Any]:
    """What `parts_on_record` needs beside the components; nothing where no step or node has a reward."""
    by_step = {name: dict(part.by_step) for name, part in parts.items() if part.by_step}
    by_node = {name: dict(part.by_node) for name, part in parts.items() if part.by_node}
    return {PARTS: {"events": events, "by_step": by_step, "by_node": by_node}} if by_step or by_node else {}


def parts_on_record(trajectory: Trajectory, names: Iterable[str]) -> tuple[dict[str, Reward], bool]:
    """What components said of a trajectory, and whether its steps' rewards are events, as `combined` kept it.

    Args:
        trajectory: that was scored by a weighted sum.
        names: of the sum's components.
    """
    found = trajectory.metadata.get(PARTS)
    kept = cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}
    by_step, by_node = kept.get("by_step", {}), kept.get("by_node", {})
    parts = {
        name: Reward(
            trajectory.components[name], by_node=by_node.get(name, {}), by_step=by_step.get(name, {})
        )
        for name in names
    }
    return parts, bool(kept.get("events"))
