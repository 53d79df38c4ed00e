"""Requests to an embedded engine, and what its streams make together."""

import json
from collections.abc import Sequence
from typing import Any

import httpx

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}


async def post(http: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await http.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "max_tokens": 4, **body}
    )


async def events(http: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    """A stream's chunks; the last event must be ``[DONE]``."""
    answer = await post(http, stream=True, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def joined(chunks: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What a stream's pieces make of one choice."""
    whole: dict[str, Any] = {"content": "", "calls": [], "ids": [], "logprobs": [], "finish": None}
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        whole["content"] += choice["delta"].get("content", "")
        whole["calls"] += [call["function"] for call in choice["delta"].get("tool_calls", [])]
        whole["ids"] += choice.get("token_ids", [])
        whole["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        whole["finish"] = choice["finish_reason"] or whole["finish"]
    return whole
