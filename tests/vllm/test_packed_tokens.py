"""Packed tokens of a real vLLM are, number for number, those of its standard form."""

import asyncio
import struct
from typing import Any

import httpx
import pytest

from art_core.capture import read_completion
from art_core.packed import HEADER, PACKED
from art_core.streaming import DONE, EventDecoder, StreamAssembler

from .conftest import Served

WANTED = {"logprobs": True, "return_token_ids": True}
TOOL = {
    "type": "function",
    "function": {"name": "move", "parameters": {"type": "object", "properties": {"to": {"type": "integer"}}}},
}
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 16},
    "one token": {"max_tokens": 1},
    "several choices": {"max_tokens": 8, "n": 3, "seed": 5},
    "a stop string": {"max_tokens": 32, "stop": ["the", " a"], "seed": 3},
    "a stop string that stays": {"max_tokens": 32, "stop": ["e"], "include_stop_str_in_output": True},
    "tools": {"max_tokens": 16, "tools": [TOOL], "tool_choice": "auto"},
    "a grammar": {"max_tokens": 20, "structured_outputs": {"choice": ["yes", "no"]}},
    "minimum length": {"max_tokens": 12, "min_tokens": 12, "seed": 9},
}


def body(model: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Count slowly: one, two, three, and on."}]
    return {"model": model, "messages": messages, "temperature": 0.8, "seed": 1, **WANTED, **more}


async def ask(url: str, request: dict[str, Any], *, packed: bool) -> dict[str, Any]:
    headers = {HEADER: PACKED} if packed else {}
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        answer = await client.post(f"{url}/chat/completions", json=request, headers=headers)
    assert answer.status_code == 200, answer.text
    if not request.get("stream"):
        return answer.json()
    events, assembler = EventDecoder(), StreamAssembler()
    for event in (*events.feed(answer.content), *events.close()):
        if event != DONE:
            assembler.feed(httpx.Response(200, content=event).json())
    return assembler.body()


def said(answer: dict[str, Any]) -> list[Any]:
    """All that an answer says of its choices, logprobs as the bits of 32-bit numbers."""
    found: list[Any] = []
    for choice in read_completion(answer):
        tokens = choice.tokens
        assert tokens is not None, choice.untrainable
        bits = struct.pack(f"{len(tokens.logprobs)}f", *tokens.logprobs)
        found.append(
            (choice.index, choice.finish_reason, choice.message, tokens.prompt, tokens.completion, bits)
        )
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_packed_and_spelled_out_answers_hold_the_same_tokens(served: Served, stream: bool):
    url, model = served.engine.base_url, served.engine.versions()[-1].name
    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for what, settings in REQUESTS.items():
        request = body(model, **settings, **more)
        # In bfloat16 a prefix from the cache, or another batch, may change the last bits: ask again then.
        for _ in range(4):
            spelled, short = await ask(url, request, packed=False), await ask(url, request, packed=True)
            assert "art_tokens" in short, what
            assert not any(c.get("logprobs") or c.get("token_ids") for c in short["choices"]), what
            assert "art_tokens" not in spelled, what
            if said(short) == said(spelled):
                break
        else:
            pytest.fail(f"{what}: {said(spelled)} is not {said(short)}")
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert spelled["usage"][count] == short["usage"][count], what


async def test_packed_and_other_requests_share_a_batch(served: Served):
    """Each of many at once has as many logprobs as tokens, whichever form it asked for."""
    url, model = served.engine.base_url, served.engine.versions()[-1].name

    async def one(number: int) -> None:
        request = body(model, max_tokens=3 + number % 9, min_tokens=3 + number % 9, seed=number)
        if number % 4 == 1:
            request = {k: v for k, v in request.items() if k not in WANTED}
        if number % 4 == 2:
            request["top_logprobs"] = 2
        answer = await ask(url, request, packed=number % 4 != 3)
        assert ("art_tokens" in answer) == (number % 4 == 0)
        if number % 4 != 1:
            (choice,) = read_completion(answer)
            assert choice.tokens is not None, choice.untrainable
            assert len(choice.tokens.logprobs) == request["max_tokens"]

    await asyncio.gather(*(one(n) for n in range(16)))


async def test_the_server_says_which_form_it_answers_in(served: Served):
    root = served.engine.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{root}/art/tokens")).json() == {"encoding": "packed", "detail": ""}
    assert (await served.engine.health()).encoding == "packed"
    log = served.engine.log_path
    assert log is not None
    said = [line for line in log.read_text().splitlines() if "art: " in line]
    assert any("EngineCore" in line and "travel once" in line for line in said)
    assert not any("WARNING" in line for line in said)


async def test_an_error_is_the_same_error(served: Served):
    request = body("no-such-model", max_tokens=2)
    async with httpx.AsyncClient(trust_env=False) as client:
        url = f"{served.engine.base_url}/chat/completions"
        plain = await client.post(url, json=request)
        short = await client.post(url, json=request, headers={HEADER: PACKED})
    assert (short.status_code, short.json()) == (plain.status_code, plain.json())
