"""Two trajectories side by side: what they have in common, and each from where it went its own way.

Invariant: the common part is a beginning of both conversations, message by message; what follows is all of
the rest of each.
"""

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from art_core.types import Message, Trajectory
from art_core.views.messages import conversation, same_message
from art_core.views.terminal import message_cells
from art_core.views.text import safe, short_id, shorten

LIMIT = 600


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two trajectories, compared.

    Attributes:
        pair: the two.
        common: the messages with which both begin.
        apart: what follows in each.
    """

    pair: tuple[Trajectory, Trajectory]
    common: tuple[Message, ...]
    apart: tuple[tuple[Message, ...], tuple[Message, ...]]

    @property
    def same_scenario(self) -> bool:
        """Whether both are rollouts of one scenario."""
        return self.pair[0].scenario == self.pair[1].scenario

    def as_data(self) -> dict[str, Any]:
        """The comparison as JSON can hold it."""
        return {
            "same_scenario": self.same_scenario,
            "common_messages": list(self.common),
            "trajectories": [
                {**_facts(t), "messages": list(rest)} for t, rest in zip(self.pair, self.apart, strict=True)
            ],
        }

    def __rich__(self) -> RenderableType:
        return _view(self)


def compare_trajectories(first: Trajectory, second: Trajectory, node: str | None = None) -> Comparison:
    """Compare two trajectories, or what one node of them was told and said.

    Raises:
        KeyError: one of them made no step in a node of this name.
    """
    a, b = conversation(first, node), conversation(second, node)
    parted = next(
        (i for i, pair in enumerate(zip(a, b, strict=False)) if not same_message(*pair)), min(len(a), len(b))
    )
    return Comparison((first, second), a[:parted], (a[parted:], b[parted:]))


def _facts(trajectory: Trajectory) -> dict[str, Any]:
    tokens = [len(step.tokens.completion) for step in trajectory.steps if step.tokens is not None]
    return {
        "id": trajectory.id,
        "scenario_id": trajectory.scenario.id,
        "status": trajectory.status.value,
        "reward": trajectory.reward,
        "components": dict(trajectory.components),
        "policies": sorted({step.policy.name for step in trajectory.steps if step.policy is not None}),
        "calls": len(trajectory.steps),
        "tokens": sum(tokens),
        "duration": trajectory.duration,
    }


def _view(compared: Comparison) -> Group:
    facts = [_facts(trajectory) for trajectory in compared.pair]
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for fact in facts:
        table.add_column(Text(safe(short_id(fact["id"]))), overflow="fold")
    names = dict.fromkeys(name for fact in facts for name in fact["components"])
    for row in ("scenario_id", "status", "reward", "policies", "calls", "tokens", "duration"):
        table.add_row(row.removesuffix("_id"), *(_cell(fact[row]) for fact in facts))
    for name in names:
        values = (_cell(fact["components"].get(name)) for fact in facts)
        table.add_row(Text(safe(shorten(name, 30)), style="dim"), *values)
    parts: list[RenderableType] = [table, Text()]
    if not compared.same_scenario:
        parts.append(Text("these are rollouts of different scenarios", style="yellow"))
    parts.append(Text(f"{len(compared.common)} messages in common", style="bold"))
    for trajectory, rest in zip(compared.pair, compared.apart, strict=True):
        parts += [Text(), Text(f"then {safe(short_id(trajectory.id))}", style="bold")]
        said = Table.grid(padding=(0, 1, 0, 2))
        said.add_column(min_width=9)
        said.add_column(overflow="fold")
        for message in rest:
            said.add_row(*message_cells(message, LIMIT))
        parts.append(said if rest else Text("  nothing more", style="dim"))
    return Group(*parts)


def _cell(value: Any) -> Text:
    if value is None:
        return Text("")
    if isinstance(value, float):
        return Text(f"{value:.3f}")
    if isinstance(value, list):
        return Text(safe(", ".join(map(str, value))))  # pyright: ignore[reportUnknownArgumentType]
    return Text(safe(shorten(str(value), 60)))
