"""Versions of the policy: each name answers with its own weights."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from helpers.answers import EXACT, say, whole
from helpers.engines import Adapters, EngineUnderTest
from helpers.parrot import FREE

ASKED: dict[str, Any] = {**EXACT, "max_tokens": 24, "seed": 3}


@pytest.fixture
def adapters(engine: EngineUnderTest) -> Adapters:
    engine.need("adapters", "trainer")
    assert engine.adapters is not None
    return engine.adapters


def distance(engine: EngineUnderTest, version: str, answer: dict[str, Any]) -> float:
    """Mean distance of its tokens' log-probabilities from those that the trainer sees under a version."""
    assert engine.logprobs is not None
    said = whole(answer["choices"][0])
    expected = engine.logprobs(version, answer["prompt_token_ids"], said.ids, 1.0)
    found = [entry["logprob"] for entry in said.logprobs]
    assert len(found) == len(said.ids)
    return sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / len(found)


def check(engine: EngineUnderTest, version: str, answer: dict[str, Any]) -> None:
    """It was answered by that version."""
    assert answer["model"] == version
    assert distance(engine, version, answer) <= engine.tolerance.mean


def test_each_version_answers_with_its_own_weights(engine: EngineUnderTest, adapters: Adapters) -> None:
    """C41"""
    versions = [engine.model, adapters.publish(), adapters.publish()]

    def ask(version: str) -> dict[str, Any]:
        return engine.ask(FREE, **ASKED, model=version)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, versions * 4))
    for version, answer in zip(versions * 4, answers, strict=True):
        check(engine, version, answer)
        own = distance(engine, version, answer)
        others = [distance(engine, other, answer) for other in versions if other != version]
        assert min(others) > max(0.05, 4 * own), "another version could have answered this"
    for version in versions[1:]:
        adapters.retire(version).result(timeout=60)


def test_a_request_ends_on_the_version_that_it_began_with(
    engine: EngineUnderTest, adapters: Adapters
) -> None:
    """C40"""
    first = adapters.publish()
    with ThreadPoolExecutor(1) as pool:
        body = {**ASKED, "max_tokens": engine.context // 2, "model": first}
        long = pool.submit(engine.ask, FREE, **body)
        newer = [adapters.publish() for _ in range(2)]
        for version in newer:
            check(engine, version, engine.ask(FREE, **ASKED, model=version))
            adapters.retire(version).result(timeout=60)
        check(engine, first, long.result(timeout=120))
    adapters.retire(first).result(timeout=60)


def test_a_retired_version_is_gone_and_the_others_stay(engine: EngineUnderTest, adapters: Adapters) -> None:
    gone = adapters.publish()
    check(engine, gone, engine.ask(FREE, **ASKED, model=gone))
    adapters.retire(gone).result(timeout=60)
    answer = engine.post(engine.request(FREE, max_tokens=1) | {"model": gone})
    assert answer.status_code == 404
    check(engine, engine.model, engine.ask(FREE, **ASKED))


def test_the_list_of_models_follows(engine: EngineUnderTest, adapters: Adapters) -> None:
    def names() -> list[str]:
        answer = httpx.get(f"{engine.base_url}/models", timeout=30).json()
        return [model["id"] for model in answer["data"]]

    version = adapters.publish()
    assert version in names()
    adapters.retire(version).result(timeout=60)
    assert version not in names()
    assert say(engine, engine.request(FREE, max_tokens=1, **EXACT), stream=False).ids
