"""What the fake vLLM's model says, as text, as token ids and as the pieces of a stream.

Token ids are the UTF-8 bytes of the text, then `END`; a prompt's ids are the bytes of its messages, then
`GENERATE`. So a test can say what the tokens of any text must be without asking the server.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

END = 256
"""The end-of-message token; sampled, so part of every completion that stopped by itself."""
GENERATE = 257
"""Last token of every prompt: the generation prompt."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of an answer; ``arguments`` goes out as it is, well-formed or not."""

    name: str
    arguments: str = "{}"
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model says: one choice.

    ``tokens`` and ``logprobs`` take the place of those that the server would make up; ``delay`` is in
    seconds, before the answer starts.
    """

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    finish_reason: str | None = None
    tokens: tuple[int, ...] | None = None
    logprobs: tuple[float | None, ...] | None = None
    delay: float = 0.0

    @property
    def rendered(self) -> str:
        """The text that the model sampled, from which the server parsed reasoning and tool calls."""
        thought = f"<think>{self.reasoning}</think>" if self.reasoning is not None else ""
        calls = "".join(
            f'<tool_call>{{"name": "{c.name}", "arguments": {c.arguments}}}</tool_call>'
            for c in self.tool_calls
        )
        return thought + self.text + calls


Scripted = str | Reply | ToolCall | Sequence[str | Reply]
Script = Callable[[dict[str, Any]], Scripted]


def encode(text: str) -> tuple[int, ...]:
    """Ids of a text, without an end token."""
    return tuple(text.encode())


def decode(ids: Iterable[int]) -> str:
    """The text of ids; special tokens have none."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def completion_ids(reply: Reply | str) -> tuple[int, ...]:
    """The ids that the server says it sampled for a reply that stopped by itself."""
    return (*encode(reply if isinstance(reply, str) else reply.rendered), END)


def prompt_text(request: Mapping[str, Any]) -> str:
    """The text of a request's prompt, as this server's chat template renders it."""
    if "prompt" in request:
        return str(request["prompt"])
    parts = [json.dumps(request["tools"])] if request.get("tools") else []
    for message in request.get("messages", ()):
        content = message.get("content")
        body = content if isinstance(content, str) else json.dumps(content)
        calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        parts.append(f"<{message.get('role')}>{body}{calls}\n")
    return "".join(parts)


def prompt_ids(request: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids of a request's prompt."""
    return (*encode(prompt_text(request)), GENERATE)


@lru_cache(maxsize=4096)
def logprob(token: int, position: int) -> float:
    """The log-probability that this server gives to a token at a position of a completion."""
    return -((token * 31 + position * 7) % 97 + 1) / 64


@lru_cache(maxsize=65536)
def logprob_entry(token: int, value: float | None, likeliest: float | None, count: int) -> str:
    """One entry of ``logprobs.content``, as JSON (``NaN`` too, which some servers send)."""
    entry = {"token": decode((token,)), "logprob": value, "bytes": [token] if token < 256 else []}
    top: list[dict[str, Any]] = []
    if likeliest is not None:  # in vLLM's order: the sampled token first, whatever its rank
        rare = value if value is None else min(value, likeliest - 1)
        top = [{**entry, "logprob": rare}, {**entry, "logprob": likeliest}]
    return json.dumps({**entry, "top_logprobs": top[:count]})


def as_reply(scripted: str | Reply | ToolCall) -> Reply:
    if isinstance(scripted, str):
        return Reply(scripted)
    return Reply(tool_calls=(scripted,)) if isinstance(scripted, ToolCall) else scripted


def wire_call(call: ToolCall, index: int) -> dict[str, Any]:
    return {
        "id": call.id or f"call_{index}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def deltas(reply: Reply, size: int, reasoning_field: str) -> list[tuple[int, int, dict[str, Any]]]:
    """Cut a reply into (first token, end token, delta) like vLLM's parsers.

    Tokens of markup (``<think>``, ``<tool_call>``, the end token) come in chunks whose delta is empty.
    """
    total = len(reply.tokens or ())
    parts: list[tuple[int, dict[str, Any] | None, str]] = []  # (tokens, fixed delta, text to show)
    if reply.reasoning is not None:
        parts += [(len(b"<think>"), {}, ""), (0, None, f"r{reply.reasoning}"), (len(b"</think>"), {}, "")]
    parts.append((0, None, f"c{reply.text}"))
    cut: list[tuple[int, int, dict[str, Any]]] = []
    at = 0
    for tokens, fixed, shown in parts:
        if fixed is not None:
            cut.append((at, at + tokens, fixed))
            at += tokens
            continue
        field, raw = reasoning_field if shown[0] == "r" else "content", shown[1:].encode()
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for start in range(0, len(raw), size):
            piece = raw[start : start + size]
            text = decoder.decode(piece, final=start + size >= len(raw))
            cut.append((at, at + len(piece), {field: text} if text else {}))
            at += len(piece)
    for index, call in enumerate(reply.tool_calls):
        wire = wire_call(call, index)
        opening = {**wire, "index": index, "function": {"name": call.name, "arguments": ""}}
        rendered = Reply(tool_calls=(call,)).rendered.encode()
        before = rendered.index(b'"arguments": ') + len(b'"arguments": ')
        cut.append((at, at + before, {"tool_calls": [opening]}))
        at += before
        text = call.arguments
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            end = at + len(piece.encode())
            fragment = {"index": index, "function": {"arguments": piece}}
            cut.append((at, end, {"tool_calls": [fragment]}))
            at = end
        after = len(b"}</tool_call>")
        cut.append((at, at + after, {}))
        at += after
    if at < total or not cut:
        cut.append((min(at, total), total, {}))
    return [(min(a, total), min(b, total), d) for a, b, d in cut]
