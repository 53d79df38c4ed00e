"""What cannot be honoured is refused, and the message says what it was."""

from typing import Any

import httpx
import pytest
from helpers.engines import EngineUnderTest
from helpers.parrot import HELLO, TOOLS

NAMED = {"type": "function", "function": {"name": "fly"}}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": -1}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.5}),
    ("top_k", {"top_k": -5}),
    ("n", {"n": 0}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 100_000}),
    ("messages", {"messages": "hello"}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("logprobs", {"logprobs": True, "top_logprobs": 1000}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": list(TOOLS), "tool_choice": NAMED}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("response_format", {"response_format": {"type": "poem"}}),
    ("seed", {"seed": "x"}),
    ("logit_bias", {"logit_bias": {"word": 1}}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("frequency_penalty", {"frequency_penalty": -3}),
    ("stop", {"stop": [7]}),
]


@pytest.mark.parametrize(("name", "change"), REFUSED, ids=lambda v: str(v)[:40])
def test_a_value_that_cannot_be_honoured_is_refused_by_name(
    engine: EngineUnderTest, name: str, change: dict[str, Any]
) -> None:
    engine.need("refusals")
    answer = engine.post(engine.request(HELLO) | change)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert name in f"{error.get('param')} {error['message']}"


def test_a_prompt_that_is_too_long_is_refused_with_the_limit(engine: EngineUnderTest) -> None:
    engine.need("refusals")
    messages = [{"role": "user", "content": "to be or not to be " * engine.context}]
    answer = engine.post(engine.request(HELLO, messages=messages, max_tokens=8))
    assert answer.status_code == 400, answer.text
    assert str(engine.context) in answer.json()["error"]["message"]


def test_an_unknown_parameter_is_refused_by_name(engine: EngineUnderTest) -> None:
    engine.need("unknown parameters")
    answer = engine.post(engine.request(HELLO, bset_of=2))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "bset_of"


def test_an_unknown_model_is_404(engine: EngineUnderTest) -> None:
    answer = engine.post(engine.request(HELLO) | {"model": "agent@999"})
    assert answer.status_code == 404
    assert "agent@999" in answer.json()["error"]["message"]


def test_a_body_that_is_not_json_is_400(engine: EngineUnderTest) -> None:
    url = f"{engine.base_url}/chat/completions"
    answer = httpx.post(url, content=b"{nope", headers={"content-type": "application/json"}, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_an_unknown_route_is_404(engine: EngineUnderTest) -> None:
    assert httpx.post(f"{engine.base_url}/no/such/route", json={}, timeout=30).status_code == 404


def test_a_refusal_leaves_the_engine_as_it_was(engine: EngineUnderTest) -> None:
    engine.need("refusals")
    engine.post(engine.request(HELLO) | {"temperature": -1})
    assert engine.ask(HELLO)["choices"][0]["message"]["content"] == HELLO.reply
