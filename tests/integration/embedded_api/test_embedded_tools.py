"""The embedded engine's HTTP face: tools, calls in both forms that it reads, and refusals."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.embedded import serving, tiny_policy
from helpers.embedded_api import HELLO, WEATHER, events, joined, post
from openai import AsyncOpenAI

from art_core.training.peft_policy import PeftPolicy

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_parsed_and_every_token_of_them_is_returned(
    http: httpx.AsyncClient, says: Any, stream: bool
) -> None:
    """C03"""
    ids = says(f"ok é🙂\n{CALL}\n{CALL.replace('Paris', 'Rome')}")
    asked = {"tools": [WEATHER], "max_tokens": 300, "return_token_ids": True, "logprobs": True}
    if stream:
        chunks = await events(http, **asked)
        indices = [c["index"] for x in chunks for y in x["choices"] for c in y["delta"].get("tool_calls", [])]
        assert indices == [0, 1]
        whole = joined(chunks)
    else:
        choice = (await post(http, **asked)).json()["choices"][0]
        whole = {
            "content": choice["message"]["content"],
            "calls": [call["function"] for call in choice["message"]["tool_calls"]],
            "ids": choice["token_ids"],
            "finish": choice["finish_reason"],
        }
    assert whole["content"] == "ok é🙂"
    assert [json.loads(call["arguments"])["city"] for call in whole["calls"]] == ["Paris", "Rome"]
    assert whole["ids"] == ids
    assert whole["finish"] == "tool_calls"


async def test_a_malformed_call_stays_text(http: httpx.AsyncClient, says: Any) -> None:
    """C08"""
    text = '<tool_call>{"name": "get_weather", "arguments": {</tool_call>'
    says(text)
    choice = (await post(http, tools=[WEATHER], max_tokens=300)).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": text}
    assert choice["finish_reason"] == "stop"


async def test_a_named_tool_is_begun_in_the_prompt_and_only_sampled_tokens_are_the_completion(
    http: httpx.AsyncClient, says: Any, policy: PeftPolicy
) -> None:
    """C01"""
    ids = says(' {"city": "Paris"}}\n</tool_call> and more')
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = (
        await post(http, tools=[WEATHER], tool_choice=named, max_tokens=100, return_token_ids=True)
    ).json()
    choice = answer["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "get_weather",
        "arguments": '{"city": "Paris"}',
    }
    assert str(policy.tokenizer.decode(answer["prompt_token_ids"])).endswith('"get_weather", "arguments":')
    assert choice["token_ids"] == ids[: len(choice["token_ids"])]
    assert len(choice["token_ids"]) < len(ids)


async def test_a_call_that_is_asked_for_is_not_begun_inside_a_thought(tmp_path: Path) -> None:
    """A template that opens the thought itself, as those of thinking models do."""
    policy = tiny_policy(tmp_path)
    template = policy.tokenizer.chat_template
    assert isinstance(template, str)
    policy.tokenizer.chat_template = template.replace(
        "<|im_start|>assistant\\n' }}\n{%- if en", "<|im_start|>assistant\\n<think>\\n' }}\n{%- if en"
    )
    assert policy.tokenizer.chat_template != template
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "return_token_ids": True, "tools": [WEATHER]}
    async with serving(policy) as (engine, _), httpx.AsyncClient(timeout=60) as http:
        url = f"{engine.base_url}/chat/completions"
        thinking = (await http.post(url, json=body)).json()
        called = (await http.post(url, json={**body, "tool_choice": "required"})).json()
    assert thinking["choices"][0]["message"]["content"] == ""
    assert thinking["choices"][0]["message"]["reasoning"]
    prompt = policy.tokenizer.decode(called["prompt_token_ids"])
    assert isinstance(prompt, str)
    assert prompt.endswith("assistant\n<think>\n</think>\n\n<tool_call>\n")
    assert "reasoning" not in called["choices"][0]["message"]


async def test_without_a_tool_parser_tools_are_refused_by_name(policy: PeftPolicy) -> None:
    async with serving(policy, tool_call_parser=None) as (engine, _), httpx.AsyncClient() as http:
        body = {"model": "tiny", "messages": HELLO, "tools": [WEATHER]}
        answer = await http.post(f"{engine.base_url}/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"


async def test_tool_choice_none_neither_shows_tools_nor_parses_calls(
    http: httpx.AsyncClient, says: Any
) -> None:
    plain = (await post(http)).json()
    says(CALL)
    answer = (await post(http, tools=[WEATHER], tool_choice="none", max_tokens=200)).json()
    assert answer["choices"][0]["message"]["content"] == CALL
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


async def test_a_conversation_with_tool_results_is_rendered(client: AsyncOpenAI) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'},
    }
    messages: Any = [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    answer = await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=2, extra_body={"return_token_ids": True}
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 20


BARE_CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
TWO_CALLS = [f"{BARE_CALL};\n{BARE_CALL.replace('Paris', 'Rome')}"]
TWO_CALLS.append(f"[{TWO_CALLS[0].replace(';', ',')}]")


@pytest.fixture
async def bare(policy: PeftPolicy) -> AsyncGenerator[httpx.AsyncClient]:
    async with (
        serving(policy, tool_call_parser="llama3_json") as (engine, _),
        httpx.AsyncClient(base_url=engine.base_url.removesuffix("/v1"), timeout=60) as http,
    ):
        yield http


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("two", TWO_CALLS, ids=["objects", "a list"])
async def test_bare_json_calls_are_parsed_and_what_is_none_stays_text(
    bare: httpx.AsyncClient, says: Any, two: str, stream: bool
) -> None:
    """C03"""
    ids = says(f'a {{b}} {{"c": 1}}\n{two} and {{"d')
    asked = {"tools": [WEATHER], "max_tokens": 300, "return_token_ids": True, "logprobs": True}
    if stream:
        whole = joined(await events(bare, **asked))
    else:
        choice = (await post(bare, **asked)).json()["choices"][0]
        whole = {
            "content": choice["message"]["content"],
            "calls": [call["function"] for call in choice["message"]["tool_calls"]],
            "ids": choice["token_ids"],
            "finish": choice["finish_reason"],
        }
    assert whole["content"] == 'a {b} {"c": 1}and {"d'
    assert [json.loads(call["arguments"])["city"] for call in whole["calls"]] == ["Paris", "Rome"]
    assert whole["ids"] == ids
    assert whole["finish"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("two", TWO_CALLS, ids=["objects", "a list"])
async def test_where_one_bare_call_is_wanted_the_first_is_given(
    bare: httpx.AsyncClient, says: Any, two: str, stream: bool
) -> None:
    """There is no closing tag that could end the answer; vLLM, too, passes over the calls after the first."""
    ids = says(two)
    asked = {"tools": [WEATHER], "parallel_tool_calls": False, "max_tokens": 300, "return_token_ids": True}
    if stream:
        whole = joined(await events(bare, **asked))
        assert ([json.loads(c["arguments"]) for c in whole["calls"]], whole["ids"]) == (
            [{"city": "Paris"}],
            ids,
        )
        return
    choice = (await post(bare, **asked)).json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert choice["token_ids"] == ids


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("end", ["}]", "}"], ids=["closed", "the list left open"])
async def test_a_bare_call_that_is_asked_for_is_begun_in_the_prompt(
    bare: httpx.AsyncClient, says: Any, policy: PeftPolicy, choice: Any, end: str
) -> None:
    """C01"""
    named = choice != "required"
    ids = says((' {"city": "Paris"}' if named else ' "get_weather", "arguments": {"city": "Paris"}') + end)
    asked = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 100, "return_token_ids": True}
    answer = (await post(bare, **asked)).json()
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    opening = '[{"name": "get_weather", "arguments":' if named else '[{"name":'
    assert str(policy.tokenizer.decode(answer["prompt_token_ids"])).endswith(f"assistant\n{opening}")
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["choices"][0]["message"]["content"] is None


async def test_a_model_whose_calls_cannot_be_read_serves_requests_without_tools(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    template = policy.tokenizer.chat_template
    assert isinstance(template, str)
    policy.tokenizer.chat_template = template.replace("<tool_call>", "[TOOL_CALLS]")
    async with (
        serving(policy) as (engine, _),
        httpx.AsyncClient(base_url=engine.base_url.removesuffix("/v1"), timeout=60) as http,
    ):
        assert (await post(http)).status_code == 200
        refused = await post(http, tools=[WEATHER])
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    for said in ("'mistral'", "hermes and llama3_json", "EngineConfig.chat_template", "kind='vllm'"):
        assert said in message
