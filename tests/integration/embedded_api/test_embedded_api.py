"""The embedded engine's HTTP face: OpenAI's schema, streams, refusals."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.embedded import serving, tiny_policy
from helpers.embedded_api import HELLO, WEATHER, events, joined, post

from art_core.config import EngineConfig
from art_core.errors import EngineError
from art_core.inference.embedded import EmbeddedEngine
from art_core.training.peft_policy import PeftPolicy
from art_core.types import PolicyVersion


async def test_a_completion_has_openais_shape_and_vllms_tokens(http: httpx.AsyncClient) -> None:
    answer = (await post(http, n=2, logprobs=True, top_logprobs=2, return_token_ids=True)).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny@0"
    assert answer["usage"] == {
        "prompt_tokens": len(answer["prompt_token_ids"]),
        "completion_tokens": sum(len(c["token_ids"]) for c in answer["choices"]),
        "total_tokens": len(answer["prompt_token_ids"]) + sum(len(c["token_ids"]) for c in answer["choices"]),
    }
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert len(content) == len(choice["token_ids"])
        assert bytes(content[0]["bytes"]).decode(errors="replace") == content[0]["token"]
        assert len(content[0]["top_logprobs"]) == 2
        assert content[0]["top_logprobs"][0]["logprob"] >= content[0]["top_logprobs"][1]["logprob"]


async def test_tokens_and_logprobs_are_given_only_when_asked_for(http: httpx.AsyncClient) -> None:
    answer = (await post(http)).json()
    assert "prompt_token_ids" not in answer
    assert answer["choices"][0]["logprobs"] is None
    assert "token_ids" not in answer["choices"][0]


async def test_an_end_token_is_sampled_and_counted_but_not_text(http: httpx.AsyncClient, says: Any) -> None:
    """C22"""
    ids = says("yes")
    answer = (await post(http, max_tokens=20, return_token_ids=True, logprobs=True)).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "yes"
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == ids
    assert answer["usage"]["completion_tokens"] == len(ids) == len(choice["logprobs"]["content"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3},
        {"stop": ["e", "th"], "max_tokens": 60},
        {"tools": [WEATHER]},
        {"temperature": 0, "max_tokens": 30},
    ],
    ids=["plain", "n", "stop", "tools", "greedy"],
)
async def test_a_streams_pieces_are_the_whole_answer(
    http: httpx.AsyncClient, options: dict[str, Any]
) -> None:
    """C03"""
    asked = {"seed": 3, "max_tokens": 40, "logprobs": True, "return_token_ids": True, **options}
    whole = (await post(http, **asked)).json()
    chunks = await events(http, **asked, stream_options={"include_usage": True})
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        streamed = joined(chunks, choice["index"])
        assert streamed["content"] == (choice["message"]["content"] or "")
        assert streamed["ids"] == choice["token_ids"]
        assert [e["token"] for e in streamed["logprobs"]] == [
            e["token"] for e in choice["logprobs"]["content"]
        ]
        assert streamed["finish"] == choice["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_text_ends_the_text_and_keeps_its_tokens(
    http: httpx.AsyncClient, says: Any, stream: bool
) -> None:
    ids = says("hello world the board")
    asked = {"max_tokens": 50, "stop": "rld the", "return_token_ids": True, "logprobs": True}
    if stream:
        whole = joined(await events(http, **asked))
    else:
        choice = (await post(http, **asked)).json()["choices"][0]
        assert choice["stop_reason"] == "rld the"
        whole = {
            "content": choice["message"]["content"],
            "ids": choice["token_ids"],
            "logprobs": choice["logprobs"]["content"],
            "finish": choice["finish_reason"],
        }
    assert whole["content"] == "hello wo"
    assert whole["finish"] == "stop"
    assert whole["ids"] == ids[: len(whole["ids"])]
    assert len(whole["ids"]) == len(whole["logprobs"]) > 2


async def test_thoughts_in_messages_reach_the_template_by_either_name(policy: PeftPolicy) -> None:
    template = policy.tokenizer.chat_template
    assert isinstance(template, str)
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m.reasoning_content or '-' }}{% endfor %}"
    try:
        async with serving(policy) as (engine, _), httpx.AsyncClient() as http:
            for name in ("reasoning", "reasoning_content"):
                messages = [{"role": "assistant", "content": "4", name: "hm"}, *HELLO]
                body = {"model": "tiny", "messages": messages, "max_tokens": 1, "return_token_ids": True}
                answer = await http.post(f"{engine.base_url}/chat/completions", json=body)
                assert policy.tokenizer.decode(answer.json()["prompt_token_ids"]) == "hm-"
    finally:
        policy.tokenizer.chat_template = template


async def test_template_settings_reach_the_template(http: httpx.AsyncClient) -> None:
    plain = (await post(http, return_token_ids=True)).json()["prompt_token_ids"]
    quick = (await post(http, return_token_ids=True, chat_template_kwargs={"enable_thinking": False})).json()
    assert quick["prompt_token_ids"][: len(plain)] == plain
    assert len(quick["prompt_token_ids"]) > len(plain)


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"frequency_penalty": 3}, "frequency_penalty", "3"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias", "100000 is no token id"),
    ({"logit_bias": {"word": 1}}, "logit_bias", "logit_bias"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"min_p": 2}, "min_p", "2"),
    ({"min_tokens": 5}, "min_tokens", "exceeds"),
    ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
    ({"best_of": 2}, "best_of", "no such parameter"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"n": 0}, "n", "n=0"),
    ({"messages": []}, "messages", "messages"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"tool_choice": "required"}, "tool_choice", "tools is empty"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "get_weather",
    ),
    ({"max_tokens": 5000}, "max_tokens", "max_model_len=1024"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
    (
        {"messages": [*HELLO, {"role": "system", "content": "x"}]},
        "messages",
        "a system message must come first",
    ),
    ({"messages": [{"role": "clown", "content": "x"}]}, "messages", "unknown role clown"),
]


@pytest.mark.parametrize(("change", "parameter", "words"), REFUSED, ids=lambda v: str(v)[:40])
async def test_what_cannot_be_honoured_is_refused_by_name(
    http: httpx.AsyncClient, change: dict[str, Any], parameter: str, words: str
) -> None:
    answer = await post(http, **change)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == parameter
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


async def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(http: httpx.AsyncClient) -> None:
    answer = await post(http, messages=[{"role": "user", "content": "x" * 2000}], max_tokens=None)
    assert answer.status_code == 400
    assert "max_model_len=1024" in answer.json()["error"]["message"]
    assert "the prompt has 20" in answer.json()["error"]["message"]


async def test_no_prompt_goes_beyond_what_the_model_can_do(policy: PeftPolicy) -> None:
    async with serving(policy, max_model_len=100_000) as (engine, _), httpx.AsyncClient() as http:
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 3000}
        answer = await http.post(f"{engine.base_url}/chat/completions", json=body)
        assert answer.status_code == 400
        assert "max_model_len=2048" in answer.json()["error"]["message"]


async def test_defaults_that_clients_send_are_accepted(http: httpx.AsyncClient) -> None:
    harmless = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "user": "u",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "stop": None,
        "tools": None,
        "logit_bias": {},
    }
    assert (await post(http, **harmless)).status_code == 200


async def test_an_unknown_model_is_404_and_lists_what_is_served(http: httpx.AsyncClient) -> None:
    answer = await post(http, model="tiny@7")
    assert answer.status_code == 404
    assert "tiny@0" in answer.json()["error"]["message"]


async def test_an_unknown_route_says_which_there_are(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/responses", json={})
    assert answer.status_code == 404
    assert "/v1/chat/completions" in answer.json()["error"]["message"]
    assert (await http.get("/health")).status_code == 200


async def test_a_body_that_is_not_json_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", content=b"{nope")
    assert answer.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_place(policy: PeftPolicy, stream: bool) -> None:
    async with serving(policy, max_batch=1) as (engine, client):
        asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 900, "stream": stream}
        long = asyncio.create_task(client.chat.completions.create(**asked, extra_body={"ignore_eos": True}))
        while not engine._scheduler._running:
            await asyncio.sleep(0.001)
        (sequence,) = engine._scheduler._running
        if stream:
            await (await long).close()  # type: ignore[union-attr]
        else:
            long.cancel()
        await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1)  # type: ignore[arg-type]
        assert sequence.output.progress.finish_reason is None
        assert not engine._scheduler._running


async def test_a_port_in_use_is_an_error_that_names_it(policy: PeftPolicy) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = EmbeddedEngine(policy, EngineConfig(port=port), served_model="tiny")
        with pytest.raises(EngineError, match=f"{port}.*EngineConfig.port"):
            await engine.start()
        await engine.close()


async def test_an_engine_without_a_version_says_so(policy: PeftPolicy) -> None:
    async with serving(policy, versions=()) as (engine, _), httpx.AsyncClient() as http:
        body = {"model": "tiny", "messages": HELLO}
        answer = await http.post(f"{engine.base_url}/chat/completions", json=body)
        assert answer.status_code == 404
        assert "no version was published" in answer.json()["error"]["message"]


async def test_versions_of_another_model_and_names_in_use_are_refused(policy: PeftPolicy) -> None:
    async with serving(policy) as (engine, _):
        with pytest.raises(EngineError, match="other"):
            await engine.publish(PolicyVersion("other", 1), None)
        with pytest.raises(EngineError, match="tiny@0"):
            await engine.publish(PolicyVersion("tiny", 0), None)


async def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    policy.tokenizer.chat_template = None
    async with serving(policy) as (engine, _), httpx.AsyncClient() as http:
        body = {"model": "tiny", "messages": HELLO}
        answer = await http.post(f"{engine.base_url}/chat/completions", json=body)
        assert answer.status_code == 400
        assert "no chat template" in answer.json()["error"]["message"]
