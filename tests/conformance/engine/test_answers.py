"""The shape of answers and of streams."""

from typing import Any

import httpx
import pytest
from helpers import parrot
from helpers.answers import EXACT, chunks_of, joined, say, whole
from helpers.engines import EngineUnderTest
from helpers.parrot import CALL, CALLS, FREE, HELLO, NO_CALL, THOUGHT, THOUGHT_CALL, Script
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

SCRIPTS = {
    "hello": HELLO,
    "call": CALL,
    "calls": CALLS,
    "talk": NO_CALL,
    "thought": THOUGHT,
    "thought and call": THOUGHT_CALL,
}
scripts = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())


def prepare(engine: EngineUnderTest, script: Script) -> None:
    if script in parrot.THINKING:
        engine.need("reasoning")


def test_an_answer_has_openais_shape(engine: EngineUnderTest) -> None:
    body = engine.ask(HELLO)
    answer = ChatCompletion.model_validate(body, strict=True)
    assert answer.object == "chat.completion"
    assert answer.id
    assert answer.created > 1_600_000_000
    assert answer.model == engine.model
    (choice,) = answer.choices
    assert choice.index == 0
    assert choice.message.role == "assistant"
    assert choice.message.content == HELLO.reply
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_has_openais_shape(engine: EngineUnderTest) -> None:
    chunks = chunks_of(engine, engine.request(HELLO, stream_options={"include_usage": True}))
    parsed = [ChatCompletionChunk.model_validate(chunk) for chunk in chunks]
    assert len({chunk.id for chunk in parsed}) == 1
    assert {chunk.object for chunk in parsed} == {"chat.completion.chunk"}
    assert {chunk.model for chunk in parsed} == {engine.model}
    assert parsed[0].choices[0].delta.role == "assistant"
    *body, last = parsed
    assert last.choices == []
    assert last.usage is not None
    assert all(chunk.choices for chunk in body)
    ends = [chunk.choices[0].finish_reason for chunk in body]
    assert ends[-1] == "stop"
    assert not any(ends[:-1])


def test_a_stream_carries_usage_only_when_asked(engine: EngineUnderTest) -> None:
    chunks = chunks_of(engine, engine.request(HELLO))
    assert all(chunk["choices"] for chunk in chunks)
    assert not any(chunk.get("usage") for chunk in chunks)


@scripts
def test_a_streams_pieces_are_the_whole_answer(engine: EngineUnderTest, script: Script) -> None:
    """C03"""
    prepare(engine, script)
    asked = engine.request(script, **EXACT)
    at_once = engine.post(asked).json()
    chunks = chunks_of(engine, {**asked, "stream_options": {"include_usage": True}})
    one, other = whole(at_once["choices"][0]), joined(chunks)
    assert other.content.strip() == one.content.strip()
    assert other.reasoning.strip() == one.reasoning.strip()
    assert other.calls == one.calls
    assert other.ids == one.ids
    assert [e["token"] for e in other.logprobs] == [e["token"] for e in one.logprobs]
    assert [e["logprob"] for e in other.logprobs] == pytest.approx(
        [e["logprob"] for e in one.logprobs], abs=engine.tolerance.most
    )
    assert other.finish == one.finish
    assert chunks[-1]["usage"]["completion_tokens"] == at_once["usage"]["completion_tokens"]
    assert chunks[0]["prompt_token_ids"] == at_once["prompt_token_ids"]


def test_no_piece_of_a_stream_ends_inside_a_character(engine: EngineUnderTest) -> None:
    chunks = chunks_of(engine, engine.request(HELLO))
    pieces = [c["choices"][0]["delta"].get("content") or "" for c in chunks]
    assert "".join(pieces) == HELLO.reply
    assert "\ufffd" not in "".join(pieces)


def test_openais_client_reads_answers_and_streams(engine: EngineUnderTest) -> None:
    with OpenAI(base_url=engine.base_url, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = engine.request(HELLO)
        extra = {k: asked.pop(k) for k in ("structured_outputs", "chat_template_kwargs") if k in asked}
        answer = client.chat.completions.create(**asked, extra_body=extra)
        assert answer.choices[0].message.content == HELLO.reply
        with client.chat.completions.create(**asked, stream=True, extra_body=extra) as stream:
            text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
        assert text == HELLO.reply
        assert engine.model in [model.id for model in client.models.list()]


def test_text_parts_are_read_like_text(engine: EngineUnderTest) -> None:
    engine.need("known ids")
    parts = [{"role": "user", "content": [{"type": "text", "text": HELLO.messages[0]["content"]}]}]
    body = engine.request(HELLO, messages=parts)
    assert say(engine, body, stream=False).content == HELLO.reply


def test_several_choices_are_numbered_and_each_complete(engine: EngineUnderTest) -> None:
    answer = engine.ask(FREE, n=3, max_tokens=12, **EXACT)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert all(len(c["token_ids"]) == 12 for c in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 36
    chunks = chunks_of(engine, engine.request(FREE, n=3, max_tokens=12, **EXACT))
    for index in range(3):
        said = joined(chunks, index)
        assert len(said.ids) == len(said.logprobs) == 12
        assert said.finish == "length"


def test_health_answers(engine: EngineUnderTest) -> None:
    assert httpx.get(engine.base_url.removesuffix("/v1") + "/health", timeout=30).status_code == 200
