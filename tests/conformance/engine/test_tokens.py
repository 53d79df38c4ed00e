"""Exact tokens: of prompts, of completions, and their log-probabilities."""

import json
import math
from typing import Any

import pytest
from helpers import parrot
from helpers.answers import EXACT, chunks_of, joined, say, whole
from helpers.engines import EngineUnderTest
from helpers.parrot import AFTER_RESULT, CALL, CALLS, FREE, HELLO, MALFORMED, THOUGHT, THOUGHT_CALL, Script

ALL = {
    "hello": HELLO,
    "call": CALL,
    "calls": CALLS,
    "malformed": MALFORMED,
    "after a result": AFTER_RESULT,
    "thought": THOUGHT,
    "thought and call": THOUGHT_CALL,
}
every_script = pytest.mark.parametrize("script", ALL.values(), ids=ALL.keys())
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def prepare(engine: EngineUnderTest, script: Script) -> None:
    if script in parrot.THINKING:
        engine.need("reasoning")


@every_script
@both_ways
def test_every_sampled_token_is_there_whatever_a_parser_made_of_the_text(
    engine: EngineUnderTest, script: Script, stream: bool
) -> None:
    """C03, C21, C22"""
    prepare(engine, script)
    body = engine.request(script, **EXACT)
    if stream:
        chunks = chunks_of(engine, {**body, "stream_options": {"include_usage": True}})
        said, usage = joined(chunks), chunks[-1]["usage"]
    else:
        answer = engine.post(body).json()
        said, usage = whole(answer["choices"][0]), answer["usage"]
    assert len(said.ids) == len(said.logprobs) == usage["completion_tokens"]
    if "known ids" in engine.lacks:
        return
    if engine.scripted:
        assert said.ids == parrot.reply_ids(engine.tokenizer, script)
    else:
        assert engine.tokenizer.decode(said.ids, skip_special_tokens=True).strip() == script.reply


@every_script
def test_the_prompt_is_what_the_models_own_template_renders(engine: EngineUnderTest, script: Script) -> None:
    prepare(engine, script)
    engine.need("known ids")
    answer = engine.ask(script, return_token_ids=True, max_tokens=1)
    assert answer["prompt_token_ids"] == engine.prompt(script)
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])


def test_the_template_drops_earlier_thoughts_and_the_server_follows_it(engine: EngineUnderTest) -> None:
    """C20"""
    engine.need("known ids", "reasoning")
    messages: list[dict[str, Any]] = []
    for turn in range(3):
        messages += [
            {"role": "user", "content": f"question {turn}"},
            {"role": "assistant", "content": f"<think>\nthought {turn}\n</think>\n\nanswer {turn}"},
        ]
    asked = Script((*messages, {"role": "user", "content": "and now?"}), "")
    prompt = engine.ask(asked, return_token_ids=True, max_tokens=1)["prompt_token_ids"]
    assert prompt == engine.prompt(asked)
    assert "thought 0" not in engine.tokenizer.decode(prompt)


def test_a_switch_of_the_template_reaches_it(engine: EngineUnderTest) -> None:
    engine.need("known ids", "reasoning")
    quick = engine.ask(parrot.NO_THOUGHT, return_token_ids=True, max_tokens=1)["prompt_token_ids"]
    assert engine.tokenizer.decode(quick).endswith("<think>\n\n</think>\n\n")


def test_how_a_client_spells_arguments_does_not_change_the_prompt(engine: EngineUnderTest) -> None:
    """C21"""
    engine.need("known ids")
    spelled = json.loads(json.dumps(AFTER_RESULT.messages))
    spelled[1]["tool_calls"][0]["function"]["arguments"] = '{"city":"Paris"}'
    body = engine.request(AFTER_RESULT, messages=spelled, return_token_ids=True, max_tokens=1)
    assert engine.post(body).json()["prompt_token_ids"] == engine.prompt(AFTER_RESULT)


def test_tokens_and_logprobs_come_only_when_asked_for(engine: EngineUnderTest) -> None:
    answer = engine.ask(HELLO)
    assert not answer.get("prompt_token_ids")
    assert not answer["choices"][0].get("token_ids")
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_trainers_forward_pass(engine: EngineUnderTest, temperature: float) -> None:
    engine.need("trainer")
    assert engine.logprobs is not None
    differences: list[float] = []
    for script in (FREE, HELLO, CALL):
        body = engine.request(script, **EXACT, seed=5) | {"temperature": temperature, "max_tokens": 60}
        body.pop("structured_outputs", None)  # a grammar would change the distribution
        answer = engine.post(body).json()
        said = whole(answer["choices"][0])
        expected = engine.logprobs(engine.model, answer["prompt_token_ids"], said.ids, temperature)
        differences += [abs(a["logprob"] - b) for a, b in zip(said.logprobs, expected, strict=True)]
    differences.sort()
    figures = (
        math.fsum(differences) / len(differences),
        differences[math.ceil(0.99 * len(differences)) - 1],
        differences[-1],
    )
    said_of_it = "mean {:.2g}, p99 {:.2g}, most {:.2g}".format(*figures)
    print(f"{engine.name}: |logprob - trainer's| {said_of_it}")
    bound = engine.tolerance
    assert figures <= (bound.mean, bound.p99, bound.most), figures
    assert all(f <= b for f, b in zip(figures, (bound.mean, bound.p99, bound.most), strict=True)), figures


def test_top_logprobs_are_the_likeliest_in_order(engine: EngineUnderTest) -> None:
    engine.need("top logprobs")
    answer = engine.ask(HELLO, logprobs=True, top_logprobs=3)
    for entry in answer["choices"][0]["logprobs"]["content"]:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) >= 3
        assert values[:3] == sorted(values, reverse=True)[:3]
        if engine.scripted:
            assert entry["top_logprobs"][0]["token"] == entry["token"]
            assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]


def test_the_bytes_of_tokens_spell_the_text(engine: EngineUnderTest) -> None:
    engine.need("token bytes")
    said = say(engine, engine.request(HELLO, **EXACT), stream=False)
    spelled = b"".join(bytes(entry["bytes"]) for entry in said.logprobs[:-1])
    assert spelled.decode() == HELLO.reply
