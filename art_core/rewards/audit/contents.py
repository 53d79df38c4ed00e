"""What a trajectory says, and how much: the words, the prompts, lengths, steps, the form of an answer.

Invariant: everything here is read off one trajectory and asks nobody, and nothing depends on its id.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from art_core.rewards.audit.answers import answer, answered
from art_core.types import Message, Step, Trajectory
from art_core.views.text import content_text, tool_calls


def said(trajectory: Trajectory) -> str:
    """Everything that models wrote, tool calls included."""
    parts: list[str] = []
    for step in answered(trajectory):
        response = cast("Message", step.response)
        parts.append(content_text(response))
        parts += [f"{name} {arguments}" for name, arguments in calls(step)]
    return "\n".join(parts)


def calls(step: Step) -> list[tuple[str, str]]:
    """Name and arguments of a step's tool calls, as text."""
    return [] if step.response is None else tool_calls(step.response)


def given(trajectory: Trajectory) -> str:
    """What the agent was told before it had said anything: its first prompts, without tools' results."""
    texts: list[str] = []
    for step in trajectory.steps:
        for message in step.messages:
            if message.get("role") in ("assistant", "tool"):
                break
            texts.append(content_text(message))
    return "\n".join(dict.fromkeys(texts))


def contents(trajectory: Trajectory) -> str:
    """What happened, as one text: equal for runs that a judge could not tell apart."""
    return "\x1e".join(
        f"{step.identity.node}\x1f{content_text(step.response) if step.response else ''}\x1f{calls(step)}"
        for step in trajectory.steps
    )


def length(trajectory: Trajectory) -> float | None:
    """Characters of everything that models wrote; None where nothing was answered."""
    return float(len(said(trajectory))) if answered(trajectory) else None


def answer_length(trajectory: Trajectory) -> float | None:
    """Characters of the answer; None where nothing was answered."""
    return float(len(answer(trajectory))) if answered(trajectory) else None


def step_count(trajectory: Trajectory) -> float | None:
    """Calls that were answered."""
    return float(len(answered(trajectory))) or None


_MARKS: Mapping[str, re.Pattern[str]] = {
    "code fence": re.compile(r"```"),
    "heading": re.compile(r"^#{1,6} ", re.MULTILINE),
    "list": re.compile(r"^\s*(?:[-*•]|\d+[.)]) ", re.MULTILINE),
    "bold": re.compile(r"\*\*[^*\n]+\*\*"),
    "table": re.compile(r"^\|.*\|\s*$", re.MULTILINE),
    "box": re.compile(r"\\boxed\{"),
    "label": re.compile(
        r"^\s*(?:final )?(?:answer|result|solution|conclusion)\s*:", re.IGNORECASE | re.MULTILINE
    ),
    "citation": re.compile(r"\[[\w-]{1,12}\]"),
    "full stop": re.compile(r"[.!?]\s*\Z"),
    "lines": re.compile(r"\n"),
}
_TAG = re.compile(r"</?([A-Za-z][\w-]{0,20})>")


def form(text: str) -> tuple[str, ...]:
    """The form of an answer, whatever it says: marks, tags and JSON keys that are in it."""
    if not text.strip():
        return ("empty",)
    found = [name for name, pattern in _MARKS.items() if pattern.search(text)]
    found += sorted({f"<{tag.lower()}>" for tag in _TAG.findall(text)})
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return tuple(found)
    keys = sorted(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else ()
    return (*found, f"json {type(value).__name__}", *keys)
