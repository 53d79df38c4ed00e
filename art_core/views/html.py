"""Trajectories in a notebook.

Invariant: everything that comes from a trajectory is escaped; the page loads nothing and runs nothing.
"""

from html import escape

from art_core.types import Message, Trajectory, TrajectoryGroup
from art_core.views.facts import step_facts, where
from art_core.views.messages import with_new_messages
from art_core.views.text import brief, content_text, safe, short_id, shorten, tool_calls

LIMIT = 4000
"""Most characters of one message that are shown."""

MOST_STEPS = 60
"""Most steps of one trajectory that are shown: the first and the last ones."""

_PRE = "margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font-size:90%"
_CELL = "vertical-align:top;text-align:left"
_OF_ROLE = {"assistant": "#3b8254", "tool": "#8a4fa3", "user": "#2f6fb3", "error": "#c0392b"}
"""A bar of this colour stands beside what each role says; the role is written there, too."""


def trajectory_html(trajectory: Trajectory, *, unfolded: bool = False) -> str:
    """A trajectory: a line about it, and its steps to unfold.

    Args:
        trajectory: whose.
        unfolded: show the steps at once; otherwise whoever reads opens each.
    """
    parts = [
        f"<div><b>{_text(trajectory.id)}</b> scenario {_text(trajectory.scenario.id)}: {_outcome(trajectory)}"
    ]
    faults = ", ".join(
        f"{count} {_text(name).replace('_', ' ')}" for name, count in trajectory.faults.items()
    )
    if faults:
        parts.append(f"<div>not captured: {faults}</div>")
    steps = list(with_new_messages(trajectory))
    left_out = (
        range(MOST_STEPS * 2 // 3, len(steps) - MOST_STEPS // 3) if len(steps) > MOST_STEPS else range(0)
    )
    for number, (step, new) in enumerate(steps):
        if number in left_out:
            if number == left_out.start:
                parts.append(f"<div>{len(left_out):,} steps are left out</div>")
            continue
        facts = " · ".join(_text(fact) for fact in (where(step), *step_facts(step)))
        said = (*new, *([step.response] if step.response else []))
        rows = "".join(_message(message) for message in said)
        if step.error is not None:
            rows += _row("error", step.error)
        opened = " open" if unfolded else ""
        parts.append(f"<details{opened}><summary>{facts}</summary><table>{rows}</table></details>")
    return "".join(parts) + "</div>"


def group_html(group: TrajectoryGroup) -> str:
    """A group: its members in a table, to be compared, and each of them to unfold."""
    rows = "".join(_member(trajectory) for trajectory in group)
    spread = f", rewards {min(group.rewards):.3f} to {max(group.rewards):.3f}" if group.rewards else ""
    heads = "".join(
        f'<td style="{_CELL}"><b>{name}</b></td>' for name in ("rollout", "outcome", "calls", "last words")
    )
    members = "".join(
        f"<details><summary>{_text(short_id(t.id))}</summary>{trajectory_html(t)}</details>" for t in group
    )
    return (
        f"<div><b>scenario {_text(group.scenario.id)}</b>, {len(group)} rollouts{spread}"
        f"<table><tr>{heads}</tr>{rows}</table>{members}</div>"
    )


def _member(trajectory: Trajectory) -> str:
    words = trajectory.steps[-1].message() if trajectory.steps else ""
    cells = (
        _text(short_id(trajectory.id)),
        _outcome(trajectory),
        str(len(trajectory.steps)),
        _text(shorten(" ".join(words.split()), 160)),
    )
    return "<tr>" + "".join(f'<td style="{_CELL}" dir="auto">{cell}</td>' for cell in cells) + "</tr>"


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
    bar = f"border-left:3px solid {_OF_ROLE.get(name, '#8a8f98')};padding-left:8px"
    return (
        f'<tr><td style="{_CELL};white-space:nowrap">{_text(brief(name, 24))}</td>'
        f'<td style="text-align:left;{bar}"><pre dir="auto" style="{_PRE}">{_text(text)}</pre></td></tr>'
    )


def _text(text: str) -> str:
    return escape(safe(shorten(text, LIMIT)))
