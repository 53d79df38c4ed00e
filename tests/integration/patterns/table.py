"""The words in which a pattern says what must be captured: calls, their order, their place in the graph.

One table serves twice: the fake server answers from it, and what was recorded is compared with it. A prompt
that no row holds is refused by the server, so a graph can't ask anything that the table doesn't show.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fakes.vllm_server import Reply, ToolCall

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Tool:
    """A tool call: in an answer, what the model asks for."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={json.dumps(v)}' for k, v in self.arguments.items())})"


def tool(name: str, /, **arguments: Any) -> Tool:
    """A tool call as it reads in Python."""
    return Tool(name, arguments)


Answer = str | tuple[Tool, ...]


@dataclass(frozen=True, eq=False)
class Call:
    """One LLM call: where it is made, what is asked, what is answered.

    Attributes:
        namespace: LangGraph's checkpoint namespace with small numbers in place of its UUIDs
            (``team:1|model:2``). Equal numbers under one prefix mean equal UUIDs, different ones different.
        graph_step: LangGraph's superstep, in the innermost graph.
        prompt: the messages, each as ``role: text``; tool calls read ``assistant: name(argument="value")``.
        answer: text, or tool calls.
        node: LangGraph's node name; None: the last part of the namespace.
        call_index: 0 for the first call of this execution of the node, then 1, 2, ...
        attempt: which execution of the node, from 1.
        superseded: whether a later execution took its place.
    """

    namespace: str
    graph_step: int
    prompt: tuple[str, ...]
    answer: Answer
    call_index: int = 0
    attempt: int = 1
    superseded: bool = False
    node: str | None = None

    @property
    def row(self) -> tuple[Any, ...]:
        """What is compared, the namespace's numbers left out (they are compared as a renaming)."""
        return (
            self.node or self.namespace.split("|")[-1].partition(":")[0],
            re.sub(r":\d+", "", self.namespace),
            self.graph_step,
            self.call_index,
            self.attempt,
            self.superseded,
            self.prompt,
            answer_text(self.answer),
        )


@dataclass(frozen=True)
class Seq:
    """Parts that happen one after the other."""

    parts: "tuple[Part, ...]"

    def __init__(self, *parts: "Part") -> None:
        object.__setattr__(self, "parts", parts)


@dataclass(frozen=True)
class Par:
    """Parts between which there is no order."""

    parts: "tuple[Part, ...]"

    def __init__(self, *parts: "Part") -> None:
        object.__setattr__(self, "parts", parts)


Part = Call | Seq | Par


def calls(part: Part) -> Iterator[Call]:
    """Every call, in the order of the table."""
    if isinstance(part, Call):
        yield part
    else:
        for inner in part.parts:
            yield from calls(inner)


def order(part: Part) -> Iterator[tuple[Call, Call]]:
    """Every pair of calls of which the first must have ended before the second starts."""
    if isinstance(part, Call):
        return
    for inner in part.parts:
        yield from order(inner)
    if isinstance(part, Seq):
        for i, before in enumerate(part.parts):
            for after in part.parts[i + 1 :]:
                yield from ((a, b) for a in calls(before) for b in calls(after))


@dataclass(frozen=True)
class Pattern:
    """A graph of LangGraph's documentation, and what must be captured of it.

    Attributes:
        build: the graph around a chat model, nodes written with ``def``.
        abuild: the same graph with ``async def`` nodes, where that is another graph.
        inputs: what it is run with, one after the other on one thread.
        expected: the calls.
        needs_handler: whether only a handler can know which of them are superseded.
    """

    build: Callable[[Any], Any]
    inputs: tuple[Any, ...]
    expected: Part
    abuild: Callable[[Any], Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    needs_handler: bool = False


def prompt_text(messages: Messages) -> tuple[str, ...]:
    """Messages in OpenAI's wire format as the table writes them."""
    return tuple(f"{message['role']}: {_said(message)}" for message in messages)


def answer_text(answer: Answer) -> str:
    """An answer as it reads in a later prompt."""
    return answer if isinstance(answer, str) else "; ".join(map(str, answer))


def reply_of(answer: Answer) -> Reply:
    """An answer as the fake server gives it."""
    if isinstance(answer, str):
        return Reply(answer)
    return Reply(tool_calls=tuple(ToolCall(tool.name, json.dumps(tool.arguments)) for tool in answer))


def script_of(expected: Part) -> Callable[[dict[str, Any]], Reply]:
    """What the fake server answers to each prompt of the table; it refuses any other."""
    replies = {call.prompt: reply_of(call.answer) for call in calls(expected)}

    def script(request: dict[str, Any]) -> Reply:
        prompt = prompt_text(request["messages"])
        if prompt not in replies:
            raise LookupError(f"no row of the table asks {prompt}")
        return replies[prompt]

    return script


def response_text(response: Mapping[str, Any] | None) -> str | None:
    """An assistant message in wire format as the table writes it; None for no message."""
    return None if response is None else _said(response)


def _said(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "".join(b.get("text", "") for b in content or ())
    tools = [
        str(Tool(call["function"]["name"], json.loads(call["function"]["arguments"])))
        for call in message.get("tool_calls") or ()
    ]
    return "; ".join(filter(None, [text, *tools]))
