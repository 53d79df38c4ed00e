"""Text that models and tools wrote, made safe and short enough to show.

Invariant: what comes out moves no cursor, rings no bell, sets no title, hides or reorders nothing, and
can be encoded as UTF-8; what was taken out has left a mark.
"""

import io
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rich.console import Console, RenderableType

from art_core.types import Message

MARK = "\N{REPLACEMENT CHARACTER}"

_TERMINAL_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC, DCS and kin
    r"|\x1b[ -/]*[0-~]"  # two-character escapes
)
_OUR_ID = re.compile(r"[a-z]-[0-9a-f]{32}")
_SHOWN_CONTROLS = "\n\t"
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
_JOINERS = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"  # emoji and several scripts need them


def safe(text: str) -> str:
    """Text without terminal sequences, control and bidirectional characters, and half surrogates."""
    if text.isascii() and text.isprintable():
        return text
    text = _TERMINAL_SEQUENCE.sub("", text.replace("\r\n", "\n"))
    return "".join(
        c if c in _SHOWN_CONTROLS or c in _JOINERS or unicodedata.category(c) not in _HIDDEN else MARK
        for c in text
    )


def shorten(text: str, limit: int) -> str:
    """Text of at most about ``limit`` characters: the middle of what is longer is left out, and counted."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return f"{text[:head]} … [{len(text) - limit:,} characters] … {text[len(text) - tail :]}"


def shown(text: object, limit: int = 300) -> str:
    """Recorded text without control and bidirectional characters, its middle left out where it is long."""
    # Shortened first, with room for what `safe` takes out: a line of megabytes is not gone through.
    return shorten(safe(shorten(str(text), limit * 4)), limit)


def brief(text: str, limit: int = 80) -> str:
    """Somebody's name for something, safe, on one line, of at most so many characters."""
    name = safe(" ".join(text[: 2 * limit].split())).replace("\n", " ")
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def short_id(name: str) -> str:
    """An id of ours by its last eight characters, which are random; others as they are.

    Ids begin with the time, so those of one batch begin alike. Commands take an end of an id for it.
    """
    return name[-8:] if _OUR_ID.fullmatch(name) else name


def content_text(message: Message) -> str:
    """A message's content as one text; parts that are no text are named in brackets."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return "" if content is None else json.dumps(content, default=str)
    return "\n".join(_part_text(part) for part in cast("Sequence[Any]", content))


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return repr(part)
    part = cast("Mapping[str, Any]", part)
    return part["text"] if isinstance(part.get("text"), str) else f"[{part.get('type', 'part')}]"


def tool_calls(message: Message) -> list[tuple[str, str]]:
    """Name and arguments of each tool call of a message, malformed ones as far as they can be read."""
    calls: Any = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return []
    found: list[tuple[str, str]] = []
    for call in cast("Sequence[Any]", calls):
        function: Any = cast("Mapping[str, Any]", call).get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            found.append(("?", json.dumps(call, default=str)))
            continue
        function = cast("Mapping[str, Any]", function)
        arguments = function.get("arguments", "")
        found.append(
            (
                str(function.get("name", "?")),
                arguments if isinstance(arguments, str) else json.dumps(arguments, default=str),
            )
        )
    return found


def rendered(view: RenderableType, *, width: int = 80, color: bool = False) -> str:
    """A view as text, ``width`` columns wide."""
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="truecolor" if color else None,
        legacy_windows=False,
    )
    with console.capture() as captured:
        console.print(view)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
