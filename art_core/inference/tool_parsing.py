"""Tool calls in text, in the Hermes form: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Invariant: the pieces found do not depend on how the text was cut when it arrived; a block that is not a
well-formed call stays text, so nothing that the model wrote is lost.

Qwen 2.5, Qwen 3, Hermes and many others write this form.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call; ``arguments`` is JSON text of an object."""

    name: str
    arguments: str


def parse_call(body: str) -> ParsedCall | None:
    """The call that stands between the tags; None when it is not one."""
    try:
        value: Any = json.loads(body)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ParsedCall(name, json.dumps(arguments, ensure_ascii=False))


class ToolCallParser:
    """Splits text that arrives in pieces into content and calls.

    White space around a call belongs to the form, not to the content, and is dropped.
    """

    def __init__(self) -> None:
        self._text = ""
        self._after_call = False

    def push(self, piece: str) -> Iterator[str | ParsedCall]:
        """Content and calls that are certain now, in order."""
        self._text += piece
        while (start := self._text.find(OPEN)) >= 0:
            # Content before a block is certain; the space between them only once the block is.
            yield from self._content(len(self._text[:start].rstrip()))
            start = self._text.find(OPEN)
            end = self._text.find(CLOSE, start)
            if end < 0:
                return
            call = parse_call(self._text[start + len(OPEN) : end])
            if call is None:
                yield from self._content(end + len(CLOSE))
            else:
                yield self._call(call, end + len(CLOSE))
        yield from self._content(len(self._text) - _uncertain(self._text))

    def finish(self) -> Iterator[str | ParsedCall]:
        """What is left at the end; a last block that was not closed counts when it is well-formed."""
        start = self._text.find(OPEN)
        call = parse_call(self._text[start + len(OPEN) :]) if start >= 0 else None
        if call is None:
            yield from self._content(len(self._text))
        else:
            yield self._call(call, len(self._text))

    def _call(self, call: ParsedCall, end: int) -> ParsedCall:
        self._text = self._text[end:]
        self._after_call = True
        return call

    def _content(self, end: int) -> Iterator[str]:
        content, self._text = self._text[:end], self._text[end:]
        if self._after_call:
            content = content.lstrip()
        if content:
            self._after_call = False
            yield content


def _uncertain(text: str) -> int:
    """How many characters at the end may belong to a block that has only begun."""
    begun = next((n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), 0)
    return len(text) - len(text[: len(text) - begun].rstrip())
