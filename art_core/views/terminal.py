"""Trajectories in a terminal.

Invariant: nothing that a model or a tool wrote is read as markup or reaches the terminal as a command.
"""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from art_core.types import Message, Step, Trajectory, TrajectoryGroup
from art_core.views.facts import step_facts, where
from art_core.views.messages import with_new_messages
from art_core.views.text import brief, content_text, safe, shorten, tool_calls

LIMIT = 600
"""Most characters of one message that are shown."""

ROLE_STYLES = {
    "system": "dim",
    "developer": "dim",
    "user": "cyan",
    "assistant": "green",
    "tool": "magenta",
}


def trajectory_view(trajectory: Trajectory, node: str | None = None, *, limit: int = LIMIT) -> Group:
    """A trajectory step by step: who called, what was new to the model, what it said."""
    parts: list[RenderableType] = [headline(trajectory)]
    if trajectory.failure is not None:
        cause = f"{trajectory.failure.cause}: {trajectory.failure.message}"
        parts.append(Text(safe(shorten(cause, limit)), style="red"))
    for step, new in with_new_messages(trajectory, node):
        parts.append(Text())
        parts.append(step_headline(step))
        said = Table.grid(padding=(0, 1, 0, 2))
        said.add_column(min_width=9)
        said.add_column(overflow="fold")
        for message in new:
            said.add_row(*message_cells(message, limit))
        if step.response is not None:
            said.add_row(*message_cells(step.response, limit))
        if step.error is not None:
            said.add_row(Text("error", style="red"), Text(safe(shorten(step.error, limit)), style="red"))
        parts.append(said)
    return Group(*parts)


def group_view(group: TrajectoryGroup) -> Table:
    """A group as a table, one member in each row."""
    table = Table(title=Text(f"scenario {brief(group.scenario.id, 200)}"), title_justify="left")
    for column in ("rollout", "status", "reward", "steps", "seconds", "last words"):
        table.add_column(column, overflow="fold" if column == "last words" else "ellipsis")
    for t in group:
        words = t.failure.message if t.failure else t.steps[-1].message() if t.steps else ""
        table.add_row(
            Text(safe(t.id)[:10]),
            Text(safe(t.failure.cause) if t.failure else t.status, style="red" if t.failed else ""),
            "" if t.reward is None else f"{t.reward:.3f}",
            str(len(t.steps)),
            "" if t.duration is None else f"{t.duration:.1f}",
            Text(safe(shorten(words, 120))),
        )
    return table


def headline(trajectory: Trajectory) -> Text:
    """Id, scenario, status, reward, and what capture could not do."""
    line = Text()
    line.append(brief(trajectory.id, 200), style="bold")
    line.append(f"  scenario {brief(trajectory.scenario.id, 200)}  ")
    line.append(trajectory.status, style="red" if trajectory.failed else "")
    if trajectory.reward is not None:
        line.append(f"  reward {trajectory.reward:.3f}", style="bold green")
    for name, value in trajectory.components.items():
        line.append(f"  {brief(name)} {value:.3f}")
    for name, count in trajectory.faults.items():
        line.append(f"  {count} {brief(name).replace('_', ' ')}", style="yellow")
    return line


def step_headline(step: Step) -> Text:
    """Branch, attempt, model, tokens, time, and why the step is not trained."""
    return Text("  ".join((f"[{where(step)}]", *step_facts(step))), style="bold")


def message_cells(message: Message, limit: int) -> tuple[Text, Text]:
    """Who speaks, and what is said, tool calls included."""
    role = safe(str(message.get("role", "?")))
    said = Text(safe(shorten(content_text(message).strip(), limit)))
    for name, arguments in tool_calls(message):
        call = f"-> {safe(name)}({safe(shorten(arguments, limit))})"
        said.append(f"\n{call}" if said else call, style="yellow")
    return Text(role, style=ROLE_STYLES.get(role, "")), said
