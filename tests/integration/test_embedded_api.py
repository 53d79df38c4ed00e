"""The embedded engine's HTTP face: OpenAI's schema, streams, tools, refusals."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers.embedded import serving, tiny_policy
from openai import AsyncOpenAI

from art_core.config import EngineConfig
from art_core.errors import EngineError
from art_core.inference.embedded import EmbeddedEngine, scheduler
from art_core.inference.embedded.sampling import Draw, Sampled
from art_core.training.peft_policy import PeftPolicy
from art_core.types import PolicyVersion

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PeftPolicy:
    return tiny_policy(tmp_path_factory.mktemp("llama"))


@pytest.fixture
async def client(policy: PeftPolicy) -> AsyncGenerator[AsyncOpenAI]:
    async with serving(policy) as (_, client):
        yield client


@pytest.fixture
async def http(policy: PeftPolicy) -> AsyncGenerator[httpx.AsyncClient]:
    async with (
        serving(policy) as (engine, _),
        httpx.AsyncClient(base_url=engine.base_url.removesuffix("/v1"), timeout=60) as http,
    ):
        yield http


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


@pytest.fixture
def says(policy: PeftPolicy, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the model say a text, and end."""

    def script(text: str) -> list[int]:
        ids: list[int] = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [*ids, policy.tokenizer.eos_token_id]  # type: ignore[list-item]
        rest = iter(ids)

        def scripted(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Sampled]:
            return [Sampled(next(rest), -0.5) for _ in draws]

        monkeypatch.setattr(scheduler, "sample", scripted)
        return ids

    return script


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
