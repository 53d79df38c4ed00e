"""Trajectories in a notebook.

Invariant: everything that comes from a trajectory is escaped; the page loads nothing and runs nothing.
"""

from html import escape

from art_core.types import Message, Trajectory, TrajectoryGroup
from art_core.views.facts import step_facts, where
from art_core.views.messages import with_new_messages
from art_core.views.text import content_text, safe, shorten, tool_calls

LIMIT = 4000
"""Most characters of one message that are shown."""

_PRE = "margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font-size:90%"


def trajectory_html(trajectory: Trajectory) -> str:
    """A trajectory: a line about it, and its steps to unfold."""
    parts = [
        f"<div><b>{_text(trajectory.id)}</b> scenario {_text(trajectory.scenario.id)}: {_outcome(trajectory)}"
    ]
    for step, new in with_new_messages(trajectory):
        facts = " · ".join(_text(fact) for fact in (where(step), *step_facts(step)))
        said = (*new, *([step.response] if step.response else []))
        rows = "".join(_message(message) for message in said)
        if step.error is not None:
            rows += _row("error", step.error)
        parts.append(f"<details><summary>{facts}</summary><table>{rows}</table></details>")
    return "".join(parts) + "</div>"


def group_html(group: TrajectoryGroup) -> str:
    """A group: its members one below the other."""
    members = "".join(trajectory_html(t) for t in group)
    return f"<div><b>scenario {_text(group.scenario.id)}</b>, {len(group)} rollouts{members}</div>"


def _outcome(trajectory: Trajectory) -> str:
    if trajectory.failure is not None:
        return f"failed ({_text(trajectory.failure.cause)}): {_text(trajectory.failure.message)}"
    if trajectory.reward is None:
        return _text(trajectory.status)
    parts = "".join(f", {_text(name)} {value:.3f}" for name, value in trajectory.components.items())
    return f"{_text(trajectory.status)}, reward {trajectory.reward:.3f}{parts}"


def _message(message: Message) -> str:
    calls = "".join(f"\n-> {name}({arguments})" for name, arguments in tool_calls(message))
    return _row(str(message.get("role", "?")), content_text(message) + calls)


def _row(name: str, text: str) -> str:
    return (
        f'<tr><td style="vertical-align:top">{_text(name)}</td>'
        f'<td style="text-align:left"><pre style="{_PRE}">{_text(text)}</pre></td></tr>'
    )


def _text(text: str) -> str:
    return escape(safe(shorten(text, LIMIT)))
