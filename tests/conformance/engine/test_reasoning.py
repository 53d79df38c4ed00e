"""Reasoning: what stands between think tags is told apart from the answer."""

import json

import pytest
from helpers.answers import EXACT, say
from helpers.engines import EngineUnderTest
from helpers.parrot import NO_THOUGHT, THOUGHT, THOUGHT_CALL

both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@both_ways
def test_thoughts_are_told_apart_from_the_answer(engine: EngineUnderTest, stream: bool) -> None:
    engine.need("reasoning")
    said = say(engine, engine.request(THOUGHT), stream=stream)
    assert said.reasoning.strip() == "Two and two make four."
    assert said.content.strip() == "The answer is 4."
    assert said.finish == "stop"


@both_ways
def test_a_call_after_thoughts_is_parsed(engine: EngineUnderTest, stream: bool) -> None:
    engine.need("reasoning")
    said = say(engine, engine.request(THOUGHT_CALL), stream=stream)
    assert said.reasoning.strip() == "I need the weather."
    assert [json.loads(call["arguments"]) for call in said.calls] == [{"city": "Rome"}]
    assert said.content.strip() == ""
    assert said.finish == "tool_calls"


@both_ways
def test_thoughts_that_do_not_end_are_thoughts(engine: EngineUnderTest, stream: bool) -> None:
    engine.need("reasoning")
    few = 14 if engine.name == "fake" else 5  # tokens of one byte are many
    said = say(engine, engine.request(THOUGHT, **EXACT, max_tokens=few), stream=stream)
    assert said.content == ""
    assert said.reasoning.strip()
    assert THOUGHT.reply.removeprefix("<think>").strip().startswith(said.reasoning.strip())
    assert said.finish == "length"
    assert len(said.ids) == len(said.logprobs) == few


@both_ways
def test_without_thinking_all_is_answer(engine: EngineUnderTest, stream: bool) -> None:
    engine.need("reasoning")
    said = say(engine, engine.request(NO_THOUGHT), stream=stream)
    assert (said.reasoning, said.content) == ("", NO_THOUGHT.reply)
