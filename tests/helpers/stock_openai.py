"""Stock ChatOpenAI whose requests end in the process, and the answers that it gets."""

import json
from typing import Any

import httpx
from langchain_openai import ChatOpenAI


def answer(**message: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "system_fingerprint": "fp-1",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def openai_model(requests: list[dict[str, Any]], content: str = "hello", **options: Any) -> ChatOpenAI:
    """Stock ChatOpenAI, with only its last hop replaced."""

    def reply(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        requests.append(body)
        if not body.get("stream"):
            return httpx.Response(200, json=answer(content=content))
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        head["system_fingerprint"] = "fp-1"
        deltas: list[tuple[dict[str, Any], str | None]] = [
            ({"role": "assistant", "content": ""}, None),
            ({"content": content}, None),
            ({}, "stop"),
        ]
        events = [{**head, "choices": [{"index": 0, "delta": d, "finish_reason": f}]} for d, f in deltas]
        text = "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"
        return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})

    transport = httpx.MockTransport(reply)
    return ChatOpenAI(
        model="m",
        base_url="http://policy.test/v1",
        api_key="none",
        http_client=httpx.Client(transport=transport),
        http_async_client=httpx.AsyncClient(transport=transport),
        max_retries=0,
        **options,
    )
