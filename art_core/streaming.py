"""A streamed completion: events cut out of bytes, and chunks put together into one body.

Invariant: the body that a `StreamAssembler` gives is the one that the same completion has unstreamed.
"""

from collections.abc import Mapping
from typing import Any, cast

from art_core.errors import CaptureError

Body = Mapping[str, Any]
"""A decoded JSON object: a request, a response, or a chunk of one."""

DONE = b"[DONE]"
"""The payload of the last event of an OpenAI stream."""


class EventDecoder:
    """Cuts server-sent events out of bytes that arrive in pieces of any size.

    Only ``data`` is of use here (OpenAI's streams have no other field); comments are dropped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Take some bytes; returns the data of each event that is now complete."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events: list[bytes] = []
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def close(self) -> list[bytes]:
        """The bytes have ended: returns the data of a last event that no blank line closed."""
        return self.feed(b"\n\n")


class StreamAssembler:
    """Puts the chunks of a streamed completion together into the body that an unstreamed one would have.

    Feed it every chunk, in order. Not thread-safe.
    """

    def __init__(self) -> None:
        self._top: dict[str, Any] = {}
        self._choices: dict[int, _ChoiceParts] = {}

    def feed(self, chunk: Any) -> None:
        """Take one decoded chunk.

        Raises:
            CaptureError: it is no chunk of a completion, or it holds an error of the server.
        """
        if not isinstance(chunk, Mapping):
            raise CaptureError(f"expected a chunk as a JSON object, found {shown(chunk)}")
        chunk = cast(Body, chunk)
        if chunk.get("error"):
            raise CaptureError(f"the stream brought an error: {shown(chunk['error'])}")
        for key, value in chunk.items():
            if key != "choices" and value is not None:
                self._top[key] = value
        choices: Any = chunk.get("choices")
        if choices is None:
            choices = []
        if not isinstance(choices, list):
            raise CaptureError(f"expected a chunk with a list of choices, found {shown(choices)}")
        for choice in cast(list[Any], choices):
            if not isinstance(choice, Mapping):
                raise CaptureError(f"expected a choice as a JSON object, found {shown(choice)}")
            choice = cast(Body, choice)
            index = _index(choice)
            parts = self._choices.get(index)
            if parts is None:
                parts = self._choices[index] = _ChoiceParts(index)
            parts.feed(choice)

    @property
    def complete(self) -> bool:
        """Whether every choice has come to its end."""
        return bool(self._choices) and all(c.finish_reason is not None for c in self._choices.values())

    def body(self) -> dict[str, Any]:
        """What has come so far, as a body."""
        kind = self._top.get("object")
        top = {**self._top, "object": kind.removesuffix(".chunk")} if isinstance(kind, str) else self._top
        return {**top, "choices": [self._choices[index].body() for index in sorted(self._choices)]}


class _ChoiceParts:
    """What has come of one choice."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self._texts: dict[str, list[str]] = {}
        self._fields: dict[str, Any] = {}
        self._tools: dict[int, dict[str, Any]] = {}
        self._plain: list[str] | None = None
        self._ids: list[int] | None = None
        self._logprobs: dict[str, list[Any]] | None = None
        self._rest: dict[str, Any] = {}

    def feed(self, choice: Body) -> None:
        for key, value in choice.items():
            if value is None:
                continue
            match key:
                case "delta" if isinstance(value, Mapping):
                    self._delta(cast(Body, value))
                case "text" if isinstance(value, str):
                    self._plain = [*(self._plain or ()), value]
                case "token_ids" if isinstance(value, list):
                    self._ids = self._ids or []
                    self._ids.extend(cast(list[int], value))
                case "logprobs" if isinstance(value, Mapping):
                    self._logprobs = self._logprobs or {}
                    for name, entries in cast(Body, value).items():
                        if isinstance(entries, list):
                            self._logprobs.setdefault(name, []).extend(cast(list[Any], entries))
                case "finish_reason":
                    self.finish_reason = value
                case "index":
                    pass
                case _:
                    self._rest[key] = value

    def _delta(self, delta: Body) -> None:
        for key, value in delta.items():
            if value is None:
                continue
            if key == "tool_calls" and isinstance(value, list):
                for call in cast(list[Any], value):
                    if not isinstance(call, Mapping):
                        raise CaptureError(f"expected a tool call as a JSON object, found {shown(call)}")
                    self._tool_call(cast(Body, call))
            elif key == "role" or not isinstance(value, str):
                self._fields[key] = value
            else:
                self._texts.setdefault(key, []).append(value)

    def _tool_call(self, delta: Body) -> None:
        call = self._tools.setdefault(
            _index(delta), {"id": None, "type": "function", "function": {"name": "", "arguments": []}}
        )
        for key in ("id", "type"):
            if delta.get(key):
                call[key] = delta[key]
        function: Any = delta.get("function") or {}
        if not isinstance(function, Mapping):
            raise CaptureError(f"expected a tool call's function as a JSON object, found {shown(function)}")
        function = cast(Body, function)
        arguments: Any = function.get("arguments") or ""
        if not isinstance(arguments, str):
            raise CaptureError(
                f"expected a piece of a tool call's arguments as a text, found {shown(arguments)}"
            )
        # A name comes whole; some servers send it again with every fragment.
        call["function"]["name"] = call["function"]["name"] or function.get("name") or ""
        call["function"]["arguments"].append(arguments)

    def body(self) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self.index, "finish_reason": self.finish_reason, **self._rest}
        if self._plain is not None:
            choice["text"] = "".join(self._plain)
        else:
            message = {"role": "assistant", **self._fields}
            message |= {key: "".join(texts) for key, texts in self._texts.items()}
            if self._tools:
                message["tool_calls"] = [
                    {**c, "function": {**c["function"], "arguments": "".join(c["function"]["arguments"])}}
                    for _, c in sorted(self._tools.items())
                ]
            message["content"] = message.get("content") or (None if self._tools else "")
            choice["message"] = message
        choice["logprobs"] = self._logprobs
        if self._ids is not None:
            choice["token_ids"] = self._ids
        return choice


def _index(piece: Body) -> int:
    """Which choice, or which tool call, a piece belongs to; the first where it does not say."""
    index: Any = piece.get("index") or 0
    if not isinstance(index, int):
        raise CaptureError(f"expected an index as an integer, found {shown(index)}")
    return index


def brings_token(chunk: Body) -> bool:
    """Whether a chunk that a `StreamAssembler` took has anything that was sampled, and not only a role."""
    for choice in cast(list[Body], chunk.get("choices") or ()):
        if choice.get("token_ids") or choice.get("text") or choice.get("finish_reason"):
            return True
        delta: Any = choice.get("delta")
        if isinstance(delta, Mapping) and any(v for k, v in cast(Body, delta).items() if k != "role"):
            return True
    return False


def shown(value: Any) -> str:
    """A value of somebody else's, short enough for an error message."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
