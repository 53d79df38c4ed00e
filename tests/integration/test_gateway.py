"""The gateway as its clients see it: stock OpenAI clients and bare HTTP, in front of a real HTTP server."""

import asyncio
import re

import httpx
import openai
import pytest
from fakes.vllm_server import FakeVLLM, Reply, ToolCall, completion_ids, prompt_ids
from helpers.gateways import HI, leave, only_step, until
from prometheus_client.parser import text_string_to_metric_families

from art_core.errors import CaptureError
from art_core.inference.gateway import Gateway
from art_core.inference.gateway_metrics import VERSIONS_KEPT
from art_core.recording import ROLLOUT_HEADER
from art_core.types import PolicyVersion, StepIdentity

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_a_client_sees_the_answer_without_what_it_did_not_ask_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m@3", messages=HI)
    assert answer.choices[0].message.content == "hello there"
    assert answer.choices[0].logprobs is None
    assert not hasattr(answer.choices[0], "token_ids")
    assert not hasattr(answer, "prompt_token_ids")


def test_the_key_in_the_fingerprint_finds_the_exact_tokens(client: openai.OpenAI, gateway: Gateway) -> None:
    answer = client.chat.completions.create(model="m@3", messages=HI, temperature=0.5)
    completion = gateway.completions.take(str(answer.system_fingerprint))
    step = only_step(completion)
    assert step.tokens is not None
    assert step.tokens.completion == completion_ids("hello there")
    assert step.tokens.prompt == prompt_ids({"messages": HI})
    assert step.policy == PolicyVersion("m", 3)
    assert step.sampling == {"temperature": 0.5}
    assert step.trainable


def test_what_the_client_asked_for_by_itself_stays_in(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=HI, logprobs=True, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].token_ids == list(completion_ids("hello there"))  # type: ignore[attr-defined]


def test_a_completion_is_handed_out_once(client: openai.OpenAI, gateway: Gateway) -> None:
    key = str(client.chat.completions.create(model="m", messages=HI).system_fingerprint)
    gateway.completions.take(key)
    with pytest.raises(CaptureError, match=f"{key} was handed out already"):
        gateway.completions.take(key)


async def test_the_async_client_streams_through_the_gateway(gateway: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key="none") as client:
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "hello there"
    (key,) = {c.system_fingerprint for c in chunks}
    step = only_step(gateway.completions.take(str(key)))
    assert step.tokens is not None
    assert step.tokens.completion == completion_ids("hello there")
    assert step.message() == "hello there"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_and_reasoning_come_with_all_their_tokens(
    fake: FakeVLLM, gateway: Gateway, client: openai.OpenAI, stream: bool
) -> None:
    """C03."""
    reply = Reply("on it", (ToolCall("weather", '{"city": "Paris"}'),), reasoning="where?")
    fake.script(reply)
    answer = client.chat.completions.create(
        model="m", messages=HI, tools=[WEATHER], stream=stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )  # type: ignore[call-overload]  # fmt: skip
    last = list(answer)[-1] if stream else answer
    step = only_step(gateway.completions.take(last.system_fingerprint))
    assert step.tokens is not None
    assert step.tokens.completion == completion_ids(reply)
    assert len(step.tokens.completion) == last.usage.completion_tokens
    assert step.response is not None
    assert step.response["reasoning_content"] == "where?"
    assert step.response["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'


def test_malformed_tool_arguments_are_kept_as_they_were_sampled(
    fake: FakeVLLM, gateway: Gateway, client: openai.OpenAI
) -> None:
    """C08."""
    fake.script(ToolCall("weather", '{"city": '))
    answer = client.chat.completions.create(model="m", messages=HI, tools=[WEATHER])
    step = only_step(gateway.completions.take(str(answer.system_fingerprint)))
    assert step.response is not None
    assert step.response["tool_calls"][0]["function"]["arguments"] == '{"city": '
    assert step.trainable


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_of_n_is_a_step_of_one_call(
    fake: FakeVLLM, gateway: Gateway, client: openai.OpenAI, stream: bool
) -> None:
    fake.script(lambda request: ["first", "second", "third"])
    answer = client.chat.completions.create(model="m", messages=HI, n=3, stream=stream)
    last = list(answer)[-1] if stream else answer
    steps = gateway.completions.take(last.system_fingerprint).steps("t-1", StepIdentity())
    assert [s.message() for s in steps] == ["first", "second", "third"]
    assert [s.choice for s in steps] == [0, 1, 2]
    assert len({s.call_id for s in steps}) == 1
    assert [s.tokens.completion for s in steps if s.tokens] == [completion_ids(s.message()) for s in steps]


def test_plain_completions_are_captured_too(client: openai.OpenAI, gateway: Gateway) -> None:
    answer = client.completions.create(model="m@1", prompt="once")
    assert answer.choices[0].text == "hello there"
    assert answer.choices[0].logprobs is None
    step = only_step(gateway.completions.take(str(answer.system_fingerprint)))
    assert step.tokens is not None
    assert step.tokens.completion == completion_ids("hello there")
    assert step.trainable


def test_the_list_of_models_is_the_servers_own(gateway: Gateway) -> None:
    assert httpx.get(f"{gateway.base_url}/models").json()["object"] == "list"


@pytest.mark.parametrize(
    ("path", "hint"), [("messages", "ChatAnthropic"), ("responses", "use_responses_api=False")]
)
@pytest.mark.parametrize("prefix", ["", "/rollouts/t-1"])
def test_other_vendors_routes_say_what_to_use(gateway: Gateway, prefix: str, path: str, hint: str) -> None:
    answer = httpx.post(f"{gateway.url}{prefix}/v1/{path}", json={})
    assert answer.status_code == 404
    assert "/v1/chat/completions" in answer.json()["error"]["message"]
    assert hint in answer.json()["error"]["message"]


def test_an_unknown_route_says_which_there_are(gateway: Gateway) -> None:
    answer = httpx.get(f"{gateway.url}/v2/chat")
    assert answer.status_code == 404
    assert "POST /v1/chat/completions" in answer.json()["error"]["message"]


def test_a_body_that_is_no_json_object_is_refused(gateway: Gateway) -> None:
    answer = httpx.post(f"{gateway.base_url}/chat/completions", content=b"[1, 2")
    assert answer.status_code == 400
    assert "JSON object" in answer.json()["error"]["message"]


def test_a_gateway_with_an_api_key_answers_nobody_without_it(fake: FakeVLLM) -> None:
    with Gateway(fake.base_url, api_key="secret") as gateway:
        assert httpx.get(f"{gateway.base_url}/models").status_code == 401
        allowed = httpx.get(f"{gateway.base_url}/models", headers={"authorization": "Bearer secret"})
        assert allowed.status_code == 200


def test_the_gateways_own_key_stays_with_the_gateway(fake: FakeVLLM) -> None:
    for key, seen in (("secret", None), (None, "Bearer theirs")):
        with Gateway(fake.base_url, api_key=key) as gateway:
            client = openai.OpenAI(base_url=gateway.base_url, api_key=key or "theirs")
            client.chat.completions.create(model="m", messages=HI)
        assert fake.requests[-1].headers.get("authorization") == seen


# -- metrics -------------------------------------------------------------------------------------------


def metrics_of(gateway: Gateway) -> dict[tuple[str, str], float]:
    """By sample name and its labels' values, sorted by label."""
    text = httpx.get(f"{gateway.url}/metrics").text
    return {
        (sample.name, ",".join(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_requests_tokens_and_errors(fake: FakeVLLM, gateway: Gateway) -> None:
    client = openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0)
    whole = client.chat.completions.create(model="m@3", messages=HI)
    list(client.chat.completions.create(model="m@3", messages=HI, stream=True))
    fake.fail(1.0, ["429"])
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="m@3", messages=HI)
    got = metrics_of(gateway)
    assert whole.usage is not None
    assert got["art_gateway_requests_total", "0,200,m@3"] == 2
    assert got["art_gateway_requests_total", "0,429,m@3"] == 1
    assert got["art_gateway_errors_total", "refused,m@3"] == 1
    # The stream had no usage: its ids were counted.
    assert got["art_gateway_prompt_tokens_total", "0,m@3"] == 2 * whole.usage.prompt_tokens
    assert got["art_gateway_completion_tokens_total", "0,m@3"] == 2 * whole.usage.completion_tokens
    assert got["art_gateway_time_to_first_token_seconds_count", "m@3"] == 1
    assert got["art_gateway_request_seconds_count", "m@3"] == 3
    assert got["art_gateway_replica_up", "0"] == 1
    assert got["art_gateway_requests_in_flight", "0"] == 0
    assert got["art_gateway_completions_kept", ""] == 3


def test_a_stream_to_a_client_that_records_it_is_passed_on_as_it_comes(
    fake: FakeVLLM, gateway: Gateway
) -> None:
    asked = {
        "model": "m@3", "messages": HI, "stream": True, "stream_options": {"include_usage": True},
        "logprobs": True, "return_token_ids": True,
    }  # fmt: skip
    got = [
        httpx.post(f"{url}/chat/completions", json=asked, headers={ROLLOUT_HEADER: "t-1"})
        for url in (fake.base_url, gateway.base_url)
    ]
    direct, passed = (re.sub(r'"(id|created)": [^,]+', "", answer.text) for answer in got)
    assert passed == direct
    counts = metrics_of(gateway)
    assert counts["art_gateway_completion_tokens_total", "0,m@3"] == len(completion_ids("hello there"))
    assert ("art_gateway_errors_total", "unreadable,m@3") not in counts
    fake.fail(1.0, ["cut_stream"])
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{gateway.base_url}/chat/completions", json=asked, headers={ROLLOUT_HEADER: "t-1"})
    assert metrics_of(gateway)["art_gateway_errors_total", "unreadable,m@3"] == 1
    assert len(gateway.completions) == 0


def test_metrics_of_a_dead_server_and_of_a_client_that_left(fake: FakeVLLM) -> None:
    with FakeVLLM("never", latency=300) as slow, Gateway(slow.base_url) as gateway:
        asyncio.run(leave(gateway, slow))
        until(lambda: metrics_of(gateway).get(("art_gateway_errors_total", "client_gone,m@0")) == 1)
    fake.fail(1.0, ["drop"])
    with Gateway(fake.base_url) as gateway:
        httpx.post(f"{gateway.base_url}/chat/completions", json={"model": "m", "messages": HI})
        got = metrics_of(gateway)
        assert got["art_gateway_errors_total", "unreachable,m@0"] == 1
        assert got["art_gateway_requests_total", "none,502,m@0"] == 1


def test_metrics_stay_bounded_whatever_is_asked_for(gateway: Gateway) -> None:
    client = openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0)
    for number in range(VERSIONS_KEPT + 10):
        client.chat.completions.create(model=f"m@{number}", messages=HI)
    versions = {
        labels.rpartition(",")[2]
        for name, labels in metrics_of(gateway)
        if name in ("art_gateway_requests_total", "art_gateway_request_seconds_count")
    }
    assert versions == {f"m@{number}" for number in range(10, VERSIONS_KEPT + 10)}
