"""A trajectory as a conversation.

Invariant: every message that a model was given or said is there, once, in the order in which it
appeared; a history that was changed in between (trimmed, summarised, another branch) is followed by what
is new in it.

This is for reading. Training never compares messages; it has the ids.
"""

import json
from collections.abc import Iterator
from typing import Any

from art_core.types import Message, Step, Trajectory
from art_core.views.text import content_text, tool_calls


def conversation(trajectory: Trajectory, node: str | None = None) -> tuple[Message, ...]:
    """The messages of a trajectory, or of one node of it.

    Args:
        trajectory: a rollout.
        node: LangGraph node name; None for all of them.

    Raises:
        KeyError: no step was made in a node of this name.
    """
    messages: list[Message] = []
    for step, new in with_new_messages(trajectory, node):
        messages.extend(new)
        if step.response is not None:
            messages.append(step.response)
    return tuple(messages)


def with_new_messages(
    trajectory: Trajectory, node: str | None = None
) -> Iterator[tuple[Step, tuple[Message, ...]]]:
    """Each step with what it was given beyond what its agent had seen and said before.

    Raises:
        KeyError: no step was made in a node of this name.
    """
    known: dict[str, list[str]] = {}
    for step in steps_of(trajectory, node):
        # Each agent has a history of its own; the system prompt tells them apart better than the
        # namespace, which is new each time that a node runs.
        agent = _agent(step)
        keys = [_key(message) for message in step.messages]
        yield step, step.messages[_common(known.get(agent, []), keys) :]
        known[agent] = keys if step.response is None else [*keys, _key(step.response)]


def steps_of(trajectory: Trajectory, node: str | None) -> tuple[Step, ...]:
    """The steps of a node, or all.

    Raises:
        KeyError: no step was made in a node of this name; the message lists those that there are.
    """
    if node is None:
        return trajectory.steps
    steps = tuple(s for s in trajectory.steps if s.identity.node == node)
    if not steps:
        known = sorted({s.identity.node for s in trajectory.steps if s.identity.node})
        raise KeyError(f"no step was made in node {node!r}; nodes with steps: {', '.join(known) or 'none'}")
    return steps


def same_message(one: Message, other: Message) -> bool:
    """Whether two messages say the same, however each was written."""
    return _key(one) == _key(other)


def _agent(step: Step) -> str:
    first = step.messages[0] if step.messages else {}
    system = content_text(first) if first.get("role") in ("system", "developer") else ""
    return f"{step.identity.node}\n{system}"


def _common(before: list[str], now: list[str]) -> int:
    for index, (old, new) in enumerate(zip(before, now, strict=False)):
        if old != new:
            return index
    return min(len(before), len(now))


def _key(message: Message) -> str:
    """What makes two messages the same, although one was written by a server and one by LangChain."""
    calls = [(name, _canonical(arguments)) for name, arguments in tool_calls(message)]
    return json.dumps(
        [message.get("role"), content_text(message).strip(), calls, message.get("tool_call_id")], default=str
    )


def _canonical(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
