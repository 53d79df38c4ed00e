"""Tool calls in text: the forms in which models write them, and what reads each.

Invariant: the pieces found do not depend on how the text was cut when it arrived; a block that is not a
well-formed call stays text, so nothing that the model wrote is lost.

A `ToolForm` is one way to write calls, under the name of vLLM's parser of it. Its parser takes text in pieces
and gives content and calls; the form also says how a prompt begins a call that must be made.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call; ``arguments`` is JSON text of an object."""

    name: str
    arguments: str


def parse_call(body: str, *, parameters: bool = False) -> ParsedCall | None:
    """The call that a JSON object stands for; None when it is not one.

    Args:
        body: JSON text.
        parameters: whether the arguments may be called ``parameters``, as Llama 3 does.
    """
    try:
        value: Any = json.loads(body)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments")
    if parameters and "arguments" not in value:
        arguments = value.get("parameters")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ParsedCall(name, json.dumps(arguments, ensure_ascii=False))


class ToolCallParser(ABC):
    """Splits text that arrives in pieces into content and calls.

    A block is a part of the text that may turn out to be a call. White space around a call belongs to the
    form, not to the content, and is dropped.
    """

    separators = " \t\r\n\f\v"
    """What may stand between two calls."""

    def __init__(self) -> None:
        self._text = ""
        self._after_call = False

    @abstractmethod
    def _block(self) -> tuple[int, int | None]:
        """Where the first block begins, or may have begun, and where it ends, once that is known."""

    @abstractmethod
    def _read(self, block: str) -> ParsedCall | None:
        """The call that a block is."""

    def push(self, piece: str) -> Iterator[str | ParsedCall]:
        """Content and calls that are certain now, in order."""
        self._text += piece
        while True:
            start, end = self._block()
            # Content before a block is certain; the space between them only once the block is.
            sure = len(self._text[:start].rstrip())
            if end is None:
                yield from self._content(sure)
                return
            call = self._read(self._text[start:end])
            if call is None:
                yield from self._content(end)
            else:
                yield from self._content(sure)
                yield self._call(call, end - sure)

    def finish(self) -> Iterator[str | ParsedCall]:
        """What is left at the end; a last block that was not closed counts when it is well-formed."""
        start, _ = self._block()
        call = self._read(self._text[start:])
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
            content = content.lstrip(self.separators)
        if content:
            self._after_call = False
            yield content


class HermesParser(ToolCallParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, of Qwen 2.5, Qwen 3, Hermes, others."""

    def _block(self) -> tuple[int, int | None]:
        start = self._text.find(OPEN)
        if start < 0:
            begun = next((n for n in range(len(OPEN) - 1, 0, -1) if self._text.endswith(OPEN[:n])), 0)
            return len(self._text) - begun, None
        close = self._text.find(CLOSE, start)
        return start, None if close < 0 else close + len(CLOSE)

    def _read(self, block: str) -> ParsedCall | None:
        if not block.startswith(OPEN):
            return None
        return parse_call(block[len(OPEN) :].removesuffix(CLOSE))


class JsonParser(ToolCallParser):
    """A bare JSON object, ``{"name": ..., "arguments": {...}}`` or with ``parameters``, as Llama 3 writes it.

    Calls stand one after the other, with white space or a semicolon between them. An object is looked at as a
    whole, so a call inside another object is none.
    """

    separators = ToolCallParser.separators + ";"

    def __init__(self) -> None:
        super().__init__()
        self._seen = 0  # of the block: how much of it was looked at, and what was found so far
        self._depth = 0
        self._quoted = False

    def _block(self) -> tuple[int, int | None]:
        begins = _OBJECT.search(self._text)
        if begins is None:
            return len(self._text), None
        start = begins.start()
        if not begins["key"]:
            return start, None
        # Looked at once, however small the pieces are: arguments may be as long as a file.
        for found in _STRUCTURE.finditer(self._text, start + self._seen):
            mark = found[0]
            if mark[0] == "\\":
                if len(mark) == 1:  # what it stands before has not come yet
                    self._seen = found.start() - start
                    return start, None
            elif mark == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if mark == "{" else -1
                if self._depth == 0:
                    self._seen = 0
                    return start, found.end()
        self._seen = len(self._text) - start
        return start, None

    def _read(self, block: str) -> ParsedCall | None:
        return parse_call(block, parameters=True)


_OBJECT = re.compile(r'\{(?=\s*(?:(?P<key>")|\Z))')
"""An object with a key, or what may become one: braces of other texts are not waited for."""
_STRUCTURE = re.compile(r'["{}]|\\.?', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolForm:
    """A way to write tool calls.

    Attributes:
        name: of vLLM's parser that reads it.
        parser: makes what reads one answer.
        begin: how a prompt begins a call of any function.
        begin_named: what comes before a call's JSON object, where the prompt names its function.
        end: ends an answer after its first call; None where nothing but the object's own end does.
        tags: texts that must be seen to read it, even where the tokenizer calls them special.
    """

    name: str
    parser: Callable[[], ToolCallParser]
    begin: str
    begin_named: str = ""
    end: str | None = None
    tags: tuple[str, ...] = ()

    def opening(self, function: str | None) -> str:
        """How a prompt begins a call of a function, or of any.

        It ends where a token of most vocabularies does: the space after it belongs to what comes next.
        """
        if function is None:
            return self.begin
        return f'{self.begin_named}{{"name": {json.dumps(function)}, "arguments":'


HERMES = ToolForm("hermes", HermesParser, f"{OPEN}\n", f"{OPEN}\n", CLOSE, (OPEN, CLOSE))
BARE_JSON = ToolForm("llama3_json", JsonParser, '{"name":')

FORMS: dict[str, ToolForm] = {form.name: form for form in (HERMES, BARE_JSON)}
"""By name."""
