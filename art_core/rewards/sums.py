"""The weighted sum of rewards: of the whole, of every part, of every step and node.

Invariant: the total is the sum of the recorded values times the recorded weights, and nothing that was
recorded is lost or overwritten.
"""

import math
from collections.abc import Callable, Mapping

from art_core.errors import RewardError
from art_core.scoring import Reward
from art_core.types import Trajectory

WEIGHT = "weight/"
"""Before a component's name: the metric that is its weight in the sum."""

SCALE = "scale/"
"""Before a component's name: the metric that its weight was divided by (`adaptive`); absent: by nothing."""


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
    total = math.fsum(whole.values())
    return (
        dict.fromkeys(whole, 1.0)
        if math.isclose(total, trajectory.reward, rel_tol=1e-6, abs_tol=1e-6)
        else {}
    )


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

    def at_node(part: Reward, node: str | None) -> float:
        return part.by_node.get(node or "", 0.0 if events else part.total)

    def at_step(part: Reward, step: str) -> float:
        earned = 0.0 if events else at_node(part, node_of.get(step))
        return part.by_step.get(step, earned)

    def total(value: Callable[[Reward], float]) -> float:
        return math.fsum(weights[name] * value(part) for name, part in parts.items())

    node_of = {step.id: step.identity.node for step in trajectory.steps}
    steps = dict.fromkeys(step for part in parts.values() for step in part.by_step)
    nodes = dict.fromkeys(node for part in parts.values() for node in part.by_node)
    return Reward(
        total(lambda part: part.total),
        components,
        {node: total(lambda part, node=node: at_node(part, node)) for node in nodes},
        {step: total(lambda part, step=step: at_step(part, step)) for step in steps},
        metrics,
    )
