"""A reward asked of parts of a trajectory: of every step, or of every node.

Invariant: a part is judged by what it was given and said itself, and by what tools answered its calls; the
agent's output is not its own.

Rewards of steps and nodes change what is trained: a step is then credited with its own reward, or, when
training has a ``gamma``, with what was earned from it on (`art_core.selection.returns`). A sum that is
trained with ``gamma`` says so: `Composed.as_events`.
"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from art_core.errors import ConfigError, RewardError
from art_core.rewards.compose import Component, as_component, evaluate
from art_core.rewards.reading import part_of
from art_core.scoring import Reward, RewardFunction
from art_core.types import Trajectory

Summary = Literal["mean", "sum", "min", "max", "last", "none"]
"""What the parts' rewards are for the whole trajectory; ``none``: 0.0, they count where they were earned."""


@dataclass(frozen=True, slots=True, init=False)
class PerStep(Component):
    """A reward of every answered call by itself, kept by step id.

    Each call is given to ``reward`` as a trajectory of one step; what tools answered its tool calls is in
    ``metadata["tool_results"]``, in the order of the calls.

    Attributes:
        reward: what each step is asked for.
        node: whose steps; None: all.
        summary: what the whole trajectory is worth.

    Raises:
        ConfigError: the summary is unknown.
    """

    reward: Component
    node: str | None
    summary: Summary

    def __init__(
        self,
        reward: Component | RewardFunction,
        *,
        node: str | None = None,
        summary: Summary = "mean",
        name: str | None = None,
    ) -> None:
        _set(self, as_component(reward), summary, name)
        object.__setattr__(self, "node", node)

    async def __call__(self, trajectory: Trajectory, output: object = None) -> Reward:
        """The steps' rewards, and their summary."""
        parts = {
            step.id: replace(part_of(trajectory, [step]), spans=())
            for step in trajectory.steps
            if step.response is not None and (self.node is None or step.identity.node == self.node)
        }
        values = await _each(self.reward, parts, trajectory, self.name)
        total = _summarised(list(values.values()), self.summary)
        return Reward(total, {self.name: total}, by_step=values)


@dataclass(frozen=True, slots=True, init=False)
class PerNode(Component):
    """A reward of every node by its own calls, kept by node name.

    Each node's calls are given to ``reward`` as a trajectory of their own.

    Attributes:
        reward: what each node is asked for.
        nodes: which; empty: all that made calls.
        summary: what the whole trajectory is worth.

    Raises:
        ConfigError: the summary is unknown.
    """

    reward: Component
    nodes: tuple[str, ...]
    summary: Summary

    def __init__(
        self,
        reward: Component | RewardFunction,
        *nodes: str,
        summary: Summary = "mean",
        name: str | None = None,
    ) -> None:
        _set(self, as_component(reward), summary, name)
        object.__setattr__(self, "nodes", nodes)

    async def __call__(self, trajectory: Trajectory, output: object = None) -> Reward:
        """The nodes' rewards, and their summary."""
        made = dict.fromkeys(s.identity.node for s in trajectory.steps if s.response is not None)
        parts = {
            node: replace(
                part_of(trajectory, [s for s in trajectory.steps if s.identity.node == node]),
                spans=tuple(s for s in trajectory.spans if s.node == node),
            )
            for node in made
            if node is not None and (not self.nodes or node in self.nodes)
        }
        values = await _each(self.reward, parts, trajectory, self.name)
        total = _summarised(list(values.values()), self.summary)
        parted = {f"{self.name}/{node}": value for node, value in values.items()}
        return Reward(total, {**parted, self.name: total}, by_node=values)


async def _each(
    reward: Component, parts: Mapping[str, Trajectory], whole: Trajectory, name: str
) -> dict[str, float]:
    """The reward of each part, all asked at once."""
    if not parts:
        made = sorted({s.identity.node for s in whole.steps if s.response is not None and s.identity.node})
        raise RewardError(
            f"reward {name!r}: trajectory {whole.id} has no answered call to be judged; nodes with answered "
            f"calls: {', '.join(made) or 'none'}"
        )
    try:
        async with asyncio.TaskGroup() as asked:
            tasks = {
                key: asked.create_task(evaluate(reward, f"{reward.name} of {key}", part, None))
                for key, part in parts.items()
            }
    except BaseExceptionGroup as broken:
        first = broken.exceptions[0]
        raise first from first.__cause__
    return {key: task.result().total for key, task in tasks.items()}


def _set(part: PerStep | PerNode, reward: Component, summary: Summary, name: str | None) -> None:
    if summary not in get_args(Summary):
        known = ", ".join(map(repr, get_args(Summary)))
        raise ConfigError(f"reward {reward.name!r}: summary={summary!r}, expected one of {known}")
    for attribute, value in (("reward", reward), ("summary", summary), ("name", name or reward.name)):
        object.__setattr__(part, attribute, value)


def _summarised(values: list[float], summary: Summary) -> float:
    match summary:
        case "mean":
            return math.fsum(values) / len(values)
        case "sum":
            return math.fsum(values)
        case "min":
            return min(values)
        case "max":
            return max(values)
        case "last":
            return values[-1]
        case "none":
            return 0.0
