"""Tool calls in text: the forms in which models write them, and what reads each.

Invariant: the pieces found do not depend on how the text was cut when it arrived; a block that is not a
well-formed call stays text, so nothing that the model wrote is lost.

A `ToolForm` is one way to write calls, under the name of vLLM's parser of it. Its parser takes text in pieces
and gives content and calls; the form also says how a prompt begins a call that must be made.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call; ``arguments`` is JSON text of an object."""

    name: str
    arguments: str


def _load(body: str) -> Any:
    """What JSON text means; None, which is no call, when it is none."""
    try:
        return json.loads(body)
    except (json.JSONDecodeError, RecursionError):
        return None


def _as_call(value: Any, *, parameters: bool = False) -> ParsedCall | None:
    """The call that a JSON value stands for; None when it is not one.

    Args:
        value: what was read.
        parameters: whether the arguments may be called ``parameters``, as Llama 3 does.
    """
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

    A block is a part of the text that may turn out to be a call, or several. White space around it belongs to
    the form, not to the content, and is dropped.
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
    def _read(self, block: str) -> Sequence[ParsedCall]:
        """The calls that a block is; none when anything in it is not one."""

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
            calls = self._read(self._text[start:end])
            if calls:
                yield from self._content(sure)
                yield from self._calls(calls, end - sure)
            else:
                yield from self._content(end)

    def finish(self) -> Iterator[str | ParsedCall]:
        """What is left at the end; a last block that was not closed counts when it is well-formed."""
        start, _ = self._block()
        calls = self._read(self._text[start:])
        yield from self._calls(calls, len(self._text)) if calls else self._content(len(self._text))

    def _calls(self, calls: Sequence[ParsedCall], end: int) -> Iterator[ParsedCall]:
        self._text = self._text[end:]
        self._after_call = True
        yield from calls

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

    def _read(self, block: str) -> Sequence[ParsedCall]:
        if not block.startswith(OPEN):
            return ()
        call = _as_call(_load(block[len(OPEN) :].removesuffix(CLOSE)))
        return () if call is None else (call,)


class JsonParser(ToolCallParser):
    """JSON without tags: ``{"name": ..., "arguments": {...}}``, or a list of such objects.

    ``parameters`` in place of ``arguments`` is read too, as Llama 3 writes it. Objects and lists stand one
    after the other, with white space or a semicolon between them. Each is looked at as a whole, so a call
    inside another object is none, and neither is one in a list that holds anything else. Only brackets that
    an object follows are taken for a list.
    """

    separators = ToolCallParser.separators + ";"

    def __init__(self) -> None:
        super().__init__()
        self._seen = 0  # of the block: how much of it was looked at, and what was found so far
        self._depth = 0
        self._quoted = False

    def _block(self) -> tuple[int, int | None]:
        begins = next(found for found in _JSON.finditer(self._text) if found["block"] is not None)
        start = begins.start()
        if not begins["key"]:
            return start, None
        # Brackets of the other kind say nothing about where it ends, if it is well-formed.
        opens = self._text[start]
        closes = {"{": "}", "[": "]"}[opens]
        # Looked at once, however small the pieces are: arguments may be as long as a file.
        for found in _STRUCTURE.finditer(self._text, start + self._seen):
            mark = found[0]
            if mark[0] == "\\":
                if len(mark) == 1:  # what it stands before has not come yet
                    self._seen = found.start() - start
                    return start, None
            elif mark == '"':
                self._quoted = not self._quoted
            elif not self._quoted and mark in (opens, closes):
                self._depth += 1 if mark == opens else -1
                if self._depth == 0:
                    self._seen = 0
                    return start, found.end()
        self._seen = len(self._text) - start
        return start, None

    def _read(self, block: str) -> Sequence[ParsedCall]:
        value = _load(block)
        if value is None and block.startswith("["):
            value = _load(block + "]")  # an answer may end before the list does, with all that it says
        values: list[Any] = value if isinstance(value, list) else [value]
        calls = [_as_call(each, parameters=True) for each in values]
        return () if None in calls else [call for call in calls if call is not None]


_JSON = re.compile(r'(?P<block>(?:\[[\[\s]*)?(?:\{\s*(?:(?P<key>")|\Z)|\Z))|\[[\[\s]*')
"""A block: an object with a key, a list that begins with one, or what may become either; or the text's end.

Braces and brackets of other texts are not waited for; a row of brackets is looked at once.
"""
_STRUCTURE = re.compile(r'["{}\[\]]|\\.?', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolForm:
    """A way to write tool calls.

    Attributes:
        name: of vLLM's parser that reads it.
        parser: makes what reads one answer.
        begin: how a prompt begins calls of any functions.
        begin_named: what comes before a call's JSON object, where the prompt names its function.
        end: ends an answer after its first call; None where nothing but the JSON's own end does.
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
BARE_JSON = ToolForm("llama3_json", JsonParser, '[{"name":', "[")

FORMS: dict[str, ToolForm] = {form.name: form for form in (HERMES, BARE_JSON)}
"""By name."""
