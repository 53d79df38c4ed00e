"""Reading answers, whole or streamed, in one form that tests can compare."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from helpers.engines import EngineUnderTest


@dataclass
class Said:
    """One choice, whichever way it came."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None


def reasoning_of(part: Mapping[str, Any]) -> str:
    """What a message or a delta holds of reasoning; vLLM has renamed the field."""
    return part.get("reasoning") or part.get("reasoning_content") or ""


def whole(choice: Mapping[str, Any]) -> Said:
    """A choice of an answer that came at once."""
    message = choice["message"]
    calls = message.get("tool_calls") or []
    return Said(
        content=message["content"] or "",
        reasoning=reasoning_of(message),
        calls=[dict(call["function"]) for call in calls],
        call_ids=[call["id"] for call in calls],
        ids=list(choice.get("token_ids") or ()),
        logprobs=list((choice.get("logprobs") or {}).get("content") or ()),
        finish=choice["finish_reason"],
    )


def joined(chunks: list[dict[str, Any]], index: int = 0) -> Said:
    """A choice put together from a stream's chunks, as OpenAI's clients do it."""
    said = Said()
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        delta = choice["delta"]
        said.content += delta.get("content") or ""
        said.reasoning += reasoning_of(delta)
        for piece in delta.get("tool_calls") or ():
            function = piece.get("function") or {}
            if piece["index"] == len(said.calls):
                said.calls.append({"name": function["name"], "arguments": ""})
                said.call_ids.append(piece["id"])
            said.calls[piece["index"]]["arguments"] += function.get("arguments") or ""
        said.ids += choice.get("token_ids") or ()
        said.logprobs += (choice.get("logprobs") or {}).get("content") or ()
        said.finish = choice.get("finish_reason") or said.finish
    return said


def chunks_of(
    engine: EngineUnderTest, body: Mapping[str, Any], *, timeout: float = 120
) -> list[dict[str, Any]]:
    """A stream's chunks; its last event must be ``[DONE]``."""
    asked = {**body, "stream": True}
    url = f"{engine.base_url}/chat/completions"
    with httpx.stream("POST", url, json=asked, timeout=timeout) as answer:
        answer.read()
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


EXACT: dict[str, Any] = {"logprobs": True, "return_token_ids": True}
"""What a recorder asks for."""


def say(engine: EngineUnderTest, body: Mapping[str, Any], *, stream: bool) -> Said:
    """The first choice of an answer."""
    if stream:
        return joined(chunks_of(engine, body))
    answer = engine.post(body)
    assert answer.status_code == 200, answer.text
    return whole(answer.json()["choices"][0])
