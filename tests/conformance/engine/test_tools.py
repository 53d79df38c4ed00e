"""Tools: parsed calls, tool choice, parallel calls."""

import json

import pytest
from helpers.answers import EXACT, say
from helpers.engines import EngineUnderTest
from helpers.parrot import ADD, AFTER_RESULT, CALL, CALLS, MALFORMED, NO_CALL, WEATHER

both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
GET_WEATHER = {"type": "function", "function": {"name": "get_weather"}}


@both_ways
def test_a_call_is_parsed(engine: EngineUnderTest, stream: bool) -> None:
    said = say(engine, engine.request(CALL), stream=stream)
    (call,) = said.calls
    assert call["name"] == "get_weather"
    assert json.loads(call["arguments"]) == {"city": "Paris"}
    assert said.content.strip() == ""
    assert said.finish == "tool_calls"
    assert all(said.call_ids)


@both_ways
def test_parallel_calls_keep_their_order_and_the_text_before_them(
    engine: EngineUnderTest, stream: bool
) -> None:
    said = say(engine, engine.request(CALLS), stream=stream)
    assert [json.loads(call["arguments"])["city"] for call in said.calls] == ["Paris", "Rome"]
    assert said.content.strip() == "Let me look."
    assert said.finish == "tool_calls"
    assert len(set(said.call_ids)) == 2


@both_ways
def test_a_malformed_call_is_no_call_and_its_text_is_kept(engine: EngineUnderTest, stream: bool) -> None:
    """C08"""
    if stream:
        engine.need("malformed calls in streams")
    said = say(engine, engine.request(MALFORMED), stream=stream)
    assert said.calls == []
    assert '"arguments": {"city":' in said.content
    assert said.finish == "stop"


@both_ways
def test_a_model_that_needs_no_tool_just_talks(engine: EngineUnderTest, stream: bool) -> None:
    said = say(engine, engine.request(NO_CALL), stream=stream)
    assert (said.content, said.calls, said.finish) == (NO_CALL.reply, [], "stop")


@both_ways
def test_a_tools_result_is_answered(engine: EngineUnderTest, stream: bool) -> None:
    assert say(engine, engine.request(AFTER_RESULT), stream=stream).content == AFTER_RESULT.reply


@both_ways
def test_tool_choice_none_gives_no_calls(engine: EngineUnderTest, stream: bool) -> None:
    engine.need("forced calls")
    said = say(engine, engine.request(CALL, tool_choice="none", max_tokens=24), stream=stream)
    assert said.calls == []
    assert said.finish in ("stop", "length")


def test_tool_choice_auto_is_what_happens_anyway(engine: EngineUnderTest) -> None:
    one, other = (
        say(engine, engine.request(CALL, **more), stream=False) for more in ({}, {"tool_choice": "auto"})
    )
    assert one.calls == other.calls


@both_ways
def test_tool_choice_required_gives_a_call(engine: EngineUnderTest, stream: bool) -> None:
    engine.need("forced calls")
    body = engine.request(CALL, tool_choice="required", **EXACT)
    body.pop("structured_outputs", None)
    said = say(engine, body, stream=stream)
    assert said.calls
    for call in said.calls:
        assert call["name"] in ("get_weather", "add")
        assert isinstance(json.loads(call["arguments"]), dict)
    assert len(said.ids) == len(said.logprobs) > 0


@both_ways
def test_a_named_tool_is_the_one_that_is_called(engine: EngineUnderTest, stream: bool) -> None:
    engine.need("forced calls")
    body = engine.request(CALL, tool_choice=GET_WEATHER, **EXACT)
    body.pop("structured_outputs", None)
    said = say(engine, body, stream=stream)
    (call,) = said.calls
    assert call["name"] == "get_weather"
    assert json.loads(call["arguments"])["city"] in ("Paris", "Rome")
    assert len(said.ids) == len(said.logprobs) > 0


@both_ways
def test_without_parallel_calls_there_is_one(engine: EngineUnderTest, stream: bool) -> None:
    engine.need("one call")
    said = say(engine, engine.request(CALLS, parallel_tool_calls=False, **EXACT), stream=stream)
    assert [json.loads(call["arguments"])["city"] for call in said.calls] == ["Paris"]
    assert said.finish == "tool_calls"
    assert len(said.ids) == len(said.logprobs)


def test_tools_of_every_shape_are_taken(engine: EngineUnderTest) -> None:
    bare = {"type": "function", "function": {"name": "now"}}
    described = {"type": "function", "function": {**ADD["function"], "description": "Adds.", "strict": True}}
    body = engine.request(NO_CALL, tools=[WEATHER, bare, described], max_tokens=2)
    answer = engine.post(body)
    assert answer.status_code == 200, answer.text
