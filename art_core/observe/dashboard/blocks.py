"""What a step was given and said, as blocks that a page can show or fold.

Invariant: everything that is new in a step is in its blocks, in order, and a block is found again by its
number, so that a page may leave the middle of a long one out and fetch it when somebody asks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from art_core.types import Message, Span, Step
from art_core.views.text import content_text, tool_calls

_REASONING = ("reasoning_content", "reasoning")
_FOLDED = {"system", "developer", "tool"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Something that was said.

    Attributes:
        number: its place in the step.
        role: who said it: a role, ``reasoning``, ``calls`` (a tool call) or ``error``.
        title: more about it: a tool's name.
        text: what was said.
        folded: whether it is shown only when somebody asks.
        given: it is part of the request, not of the answer.
    """

    number: int
    role: str
    title: str = ""
    text: str
    folded: bool = False
    given: bool = False


def step_blocks(step: Step, given: Sequence[Message]) -> list[Block]:
    """The blocks of a step.

    Args:
        step: an LLM call.
        given: the messages of its request that are to be shown.
    """
    found: list[Block] = []
    names = _tool_names(step.messages)
    for message in given:
        _add(found, message, names, given=True)
    if step.response is not None:
        _add(found, step.response, names, given=False)
    if step.error is not None:
        found.append(Block(number=len(found), role="error", text=step.error))
    return found


def _add(found: list[Block], message: Message, names: Mapping[str, str], *, given: bool) -> None:
    role = str(message.get("role", "?"))
    for key in _REASONING:
        thought = message.get(key)
        if isinstance(thought, str) and thought:
            found.append(Block(number=len(found), role="reasoning", text=thought, folded=True, given=given))
            break
    text = content_text(message)
    calls = tool_calls(message)
    if text or not calls:
        title = names.get(str(message.get("tool_call_id")), "") if role == "tool" else ""
        folded = given and role in _FOLDED
        found.append(Block(number=len(found), role=role, title=title, text=text, folded=folded, given=given))
    for name, arguments in calls:
        shown = pretty(arguments)
        found.append(
            Block(
                number=len(found), role="calls", title=name, text=shown, folded=len(shown) > 200, given=given
            )
        )


def _tool_names(messages: Sequence[Message]) -> dict[str, str]:
    """Names of the tools by the ids of their calls."""
    found: dict[str, str] = {}
    for message in messages:
        calls: Any = message.get("tool_calls")
        if not isinstance(calls, list):
            continue
        for call in cast("list[Any]", calls):
            if isinstance(call, Mapping):
                call = cast("Mapping[str, Any]", call)
                function = call.get("function")
                name = (
                    cast("Mapping[str, Any]", function).get("name") if isinstance(function, Mapping) else None
                )
                if isinstance(name, str):
                    found[str(call.get("id"))] = name
    return found


def pretty(text: str) -> str:
    """JSON with line breaks, where it is JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return as_text(value) if isinstance(value, dict | list) else text


def as_text(value: Any) -> str:
    """A traced value for reading; of a message that a tool returned, what it says."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and "role" in value and "content" in value:
        return content_text(cast("Message", value))
    try:
        written = json.dumps(value, ensure_ascii=False, default=repr)
        return written if len(written) < 70 else json.dumps(value, ensure_ascii=False, indent=2, default=repr)
    except (ValueError, TypeError, RecursionError):
        return repr(value)


def span_text(span: Span, side: str) -> str:
    """What went into a traced tool, or what came out."""
    return as_text(span.inputs) if side == "inputs" else span.error or as_text(span.outputs)
