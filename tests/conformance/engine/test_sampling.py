"""How tokens are chosen, and what ends a completion."""

from typing import Any

import pytest
from helpers.answers import EXACT, say, whole
from helpers.engines import EngineUnderTest
from helpers.parrot import FREE, HELLO, reply_ids

both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def free(engine: EngineUnderTest, **more: Any) -> list[int]:
    return say(engine, engine.request(FREE, **{"max_tokens": 24, **EXACT, **more}), stream=False).ids


def test_a_seed_gives_the_same_tokens_again(engine: EngineUnderTest) -> None:
    engine.need("sampling")
    assert free(engine, seed=7) == free(engine, seed=7)
    assert free(engine, seed=7) != free(engine, seed=8)


def test_choices_of_one_seed_differ_and_come_again(engine: EngineUnderTest) -> None:
    engine.need("sampling")

    def ask() -> list[list[int]]:
        answer = engine.ask(FREE, n=3, seed=7, max_tokens=16, **EXACT)
        return [choice["token_ids"] for choice in answer["choices"]]

    first = ask()
    assert len(set(map(tuple, first))) == 3
    assert ask() == first


def test_without_a_seed_answers_differ(engine: EngineUnderTest) -> None:
    engine.need("sampling")
    assert free(engine) != free(engine)


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_without_choice_the_likeliest_token_is_taken(
    engine: EngineUnderTest, settings: dict[str, Any]
) -> None:
    engine.need("sampling")
    greedy = say(
        engine, engine.request(FREE, **EXACT, top_logprobs=1, max_tokens=12) | settings, stream=False
    )
    for entry in greedy.logprobs:
        assert entry["logprob"] == max(entry["logprob"], *(t["logprob"] for t in entry["top_logprobs"]))


def test_top_p_keeps_to_the_likeliest(engine: EngineUnderTest) -> None:
    engine.need("sampling")
    wide = say(
        engine, engine.request(FREE, **EXACT, seed=1, max_tokens=100) | {"temperature": 2}, stream=False
    )
    narrow = say(
        engine,
        engine.request(FREE, **EXACT, seed=1, max_tokens=100) | {"temperature": 2, "top_p": 0.1},
        stream=False,
    )
    assert sum(e["logprob"] for e in narrow.logprobs) > sum(e["logprob"] for e in wide.logprobs)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@both_ways
def test_a_limit_ends_a_completion(engine: EngineUnderTest, name: str, stream: bool) -> None:
    body = engine.request(FREE, **EXACT)
    del body["max_tokens"]
    said = say(engine, {**body, name: 7}, stream=stream)
    assert said.finish == "length"
    assert len(said.ids) == len(said.logprobs) == 7


@both_ways
@pytest.mark.parametrize("stop", ["rld", ["nothing", "rld! C"]], ids=["text", "list"])
def test_a_stop_text_ends_the_text_and_keeps_the_tokens(
    engine: EngineUnderTest, stop: str | list[str], stream: bool
) -> None:
    said = say(engine, engine.request(HELLO, **EXACT, stop=stop), stream=stream)
    assert said.content == "Hello, wo"
    assert said.finish == "stop"
    assert len(said.ids) == len(said.logprobs)
    if "known ids" not in engine.lacks and engine.scripted:
        whole = reply_ids(engine.tokenizer, HELLO)
        assert said.ids == whole[: len(said.ids)]
        assert "rld" in engine.tokenizer.decode(said.ids)
        assert len(said.ids) < len(whole)


def test_a_stop_text_is_named(engine: EngineUnderTest) -> None:
    engine.need("stop tokens")
    answer = engine.ask(HELLO, stop=["nothing", "rld"])
    assert answer["choices"][0]["stop_reason"] == "rld"


@both_ways
def test_a_stop_token_ends_the_completion_and_is_one_of_its_tokens(
    engine: EngineUnderTest, stream: bool
) -> None:
    engine.need("stop tokens", "known ids")
    ids = reply_ids(engine.tokenizer, HELLO)
    said = say(engine, engine.request(HELLO, **EXACT, stop_token_ids=[ids[3]]), stream=stream)
    if not engine.scripted:
        pytest.skip(f"{engine.name} may spell the reply in other tokens")
    assert said.ids == ids[:4]
    assert said.content == engine.tokenizer.decode(ids[:3])
    assert said.finish == "stop"


def test_an_end_token_may_be_ignored(engine: EngineUnderTest) -> None:
    engine.need("sampling")
    body = engine.request(HELLO, **EXACT, ignore_eos=True, max_tokens=40)
    body.pop("structured_outputs", None)
    assert len(say(engine, body, stream=False).ids) == 40


def test_a_bias_of_minus_100_forbids_a_token(engine: EngineUnderTest) -> None:
    engine.need("sampling", "known ids")
    first = reply_ids(engine.tokenizer, HELLO)[0]
    body = engine.request(HELLO, **EXACT, logit_bias={str(first): -100}, max_tokens=8)
    body.pop("structured_outputs", None)
    assert first not in say(engine, body, stream=False).ids


def test_a_bias_of_100_forces_a_token_and_its_logprob_says_so(engine: EngineUnderTest) -> None:
    engine.need("sampling", "known ids", "trainer")
    forced = reply_ids(engine.tokenizer, HELLO)[1]
    body = engine.request(FREE, **EXACT, logit_bias={str(forced): 100}, max_tokens=6)
    answer = engine.post(body).json()
    said = whole(answer["choices"][0])
    assert set(said.ids) == {forced}
    # Of what was sampled from, as at every temperature; without the bias these tokens are unlikely.
    assert [entry["logprob"] for entry in said.logprobs] == pytest.approx([0.0] * 6, abs=1e-3)


def test_penalties_keep_a_model_from_repeating_itself(engine: EngineUnderTest) -> None:
    engine.need("sampling")
    asked = {"max_tokens": 30, "seed": 2}
    plain = say(engine, engine.request(FREE, **EXACT, **asked) | {"temperature": 0.3}, stream=False).ids
    spread = say(
        engine,
        engine.request(FREE, **EXACT, **asked, presence_penalty=2, frequency_penalty=2)
        | {"temperature": 0.3},
        stream=False,
    ).ids
    assert len(set(spread)) > len(set(plain))


def test_a_least_length_is_reached(engine: EngineUnderTest) -> None:
    engine.need("sampling", "known ids")
    shortest = len(reply_ids(engine.tokenizer, HELLO)) + 8
    body = engine.request(HELLO, **EXACT, min_tokens=shortest, max_tokens=shortest + 4)
    body.pop("structured_outputs", None)
    assert len(say(engine, body, stream=False).ids) >= shortest
