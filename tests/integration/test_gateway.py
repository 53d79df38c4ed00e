"""The gateway as its clients see it: stock OpenAI clients and bare HTTP, in front of a real HTTP server."""

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import httpx
import openai
import pytest
from fakes.vllm_server import FakeVLLM, Reply, ToolCall, completion_ids, prompt_ids
from prometheus_client.parser import text_string_to_metric_families

from art_core.errors import CaptureError, EngineError
from art_core.inference.endpoint import StaticEndpoint, VersionLeases
from art_core.inference.gateway import Gateway
from art_core.inference.gateway_log import Completion, CompletionLog
from art_core.inference.gateway_metrics import VERSIONS_KEPT
from art_core.inference.gateway_proxy import CLIENT_GONE, KEY_HEADER, POLICY_HEADER
from art_core.recording import ROLLOUT_HEADER, NullSink, Rollout, Sink
from art_core.types import PolicyVersion, Step, StepIdentity

HI = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    with FakeVLLM("hello there") as server:
        yield server


@pytest.fixture
def gateway(fake: FakeVLLM) -> Iterator[Gateway]:
    with Gateway(fake.base_url) as started:
        yield started


@pytest.fixture
def client(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0)


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)


def only_step(completion: Completion) -> Step:
    (step,) = completion.steps("t-1", StepIdentity())
    return step


# -- what clients see ----------------------------------------------------------------------------------


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


# -- versions ------------------------------------------------------------------------------------------


class MovingPolicy:
    """An endpoint whose current version the test moves."""

    name = "agent"
    api_key = "server-key"
    sink: Sink = NullSink()

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.number = 0
        self.leases = VersionLeases()

    def current_version(self) -> PolicyVersion:
        return PolicyVersion(self.name, self.number)

    def lease(self, version: PolicyVersion | None = None) -> AbstractContextManager[PolicyVersion]:
        return self.leases.lease(version or self.current_version())


def test_the_plain_policy_name_means_the_version_that_is_current_at_the_call(fake: FakeVLLM) -> None:
    """C06."""
    policy = MovingPolicy(fake.base_url)
    with Gateway(policy) as gateway:
        client = openai.OpenAI(base_url=gateway.base_url, api_key="client-key")
        for policy.number in (0, 2):
            answer = client.chat.completions.with_raw_response.create(model="agent", messages=HI)
            assert answer.headers[POLICY_HEADER] == f"agent@{policy.number}"
            assert answer.parse().model == f"agent@{policy.number}"
            completion = gateway.completions.take(answer.headers[KEY_HEADER])
            assert completion.policy == PolicyVersion("agent", policy.number)
        assert client.chat.completions.create(model="agent@1", messages=HI).model == "agent@1"
    assert [b["model"] for b in fake.bodies] == ["agent@0", "agent@2", "agent@1"]
    assert fake.requests[0].headers["authorization"] == "Bearer server-key"


def test_a_model_that_is_not_the_policy_is_passed_on_and_not_trained(fake: FakeVLLM) -> None:
    with Gateway(MovingPolicy(fake.base_url)) as gateway:
        client = openai.OpenAI(base_url=gateway.base_url, api_key="none")
        answer = client.chat.completions.create(model="judge", messages=HI)
        step = only_step(gateway.completions.take(str(answer.system_fingerprint)))
    assert step.policy is None
    assert step.untrainable == "judge is no policy of ours"


def test_a_version_is_leased_until_the_server_has_answered_in_full(fake: FakeVLLM) -> None:
    policy = MovingPolicy(fake.base_url)
    version = policy.current_version()
    with Gateway(policy) as gateway:
        client = openai.OpenAI(base_url=gateway.base_url, api_key="none")
        call = threading.Thread(
            target=client.chat.completions.create, kwargs={"model": "agent", "messages": HI}
        )
        with fake.holding():
            call.start()
            until(lambda: fake.bodies)
            assert policy.leases.held(version) == 1
        call.join()
        assert policy.leases.held(version) == 0


def test_a_static_endpoint_is_asked_by_the_name_that_it_serves(fake: FakeVLLM) -> None:
    with Gateway(StaticEndpoint(fake.base_url, "qwen")) as gateway:
        client = openai.OpenAI(base_url=gateway.base_url, api_key="none")
        answer = client.chat.completions.create(model="qwen", messages=HI)
        assert gateway.completions.take(str(answer.system_fingerprint)).policy == PolicyVersion("qwen", 0)
    assert fake.bodies[0]["model"] == "qwen"


# -- several servers -----------------------------------------------------------------------------------


def conversation(number: int, turns: int = 1) -> list[dict[str, str]]:
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"question {number}"}]
    for turn in range(turns - 1):
        said += [{"role": "assistant", "content": f"answer {turn}"}, {"role": "user", "content": "go on"}]
    return said


def test_all_turns_of_a_conversation_go_to_one_server_and_conversations_are_spread(fake: FakeVLLM) -> None:
    with FakeVLLM("other") as other, Gateway([fake.base_url, other.base_url]) as gateway:
        client = openai.OpenAI(base_url=gateway.base_url, api_key="none")
        for turns in (1, 2, 3):
            for number in range(40):
                client.chat.completions.create(
                    model="m", messages=conversation(number, turns), stream=turns == 2
                )  # type: ignore[call-overload]
        asked = [{b["messages"][1]["content"] for b in server.bodies} for server in (fake, other)]
    assert not asked[0] & asked[1]
    assert min(len(a) for a in asked) >= 10


def test_calls_beyond_a_servers_share_go_to_the_other(fake: FakeVLLM) -> None:
    with FakeVLLM("other") as other, Gateway([fake.base_url, other.base_url]) as gateway:
        client = openai.OpenAI(base_url=gateway.base_url, api_key="none")
        calls = [
            threading.Thread(target=client.chat.completions.create, kwargs={"model": "m", "messages": HI})
            for _ in range(40)
        ]
        with fake.holding(), other.holding():
            for call in calls:
                call.start()
            until(lambda: len(fake.bodies) + len(other.bodies) == 40)
        for call in calls:
            call.join()
        # A busy server has 1.25 of its share at most: of 40 calls at once, 25.
        assert max(len(fake.bodies), len(other.bodies)) <= 27


def test_a_prompt_cache_key_or_a_rollout_says_what_belongs_together(fake: FakeVLLM) -> None:
    with FakeVLLM("other") as other, Gateway([fake.base_url, other.base_url]) as gateway:
        client = openai.OpenAI(base_url=gateway.base_url, api_key="none")
        for extra in (
            {"extra_body": {"prompt_cache_key": "k"}},
            {"extra_headers": {ROLLOUT_HEADER: "r"}},
            {"_base_url": gateway.register(Rollout(rollout_id="t-9"))},
        ):
            to = client.with_options(base_url=extra.pop("_base_url", gateway.base_url))
            before = [len(fake.bodies), len(other.bodies)]
            for number in range(8):
                to.chat.completions.create(model="m", messages=conversation(number), **extra)  # type: ignore[call-overload]
            assert {len(fake.bodies) - before[0], len(other.bodies) - before[1]} == {0, 8}


def test_a_client_that_records_by_itself_leaves_nothing_in_the_log(
    client: openai.OpenAI, gateway: Gateway
) -> None:
    answer = client.chat.completions.create(model="m", messages=HI, extra_headers={ROLLOUT_HEADER: "t-1"})
    assert len(gateway.completions) == 0
    with pytest.raises(CaptureError, match="t-1"):
        gateway.completions.take(str(answer.system_fingerprint))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["drop", "down"])
def test_a_call_that_a_server_never_answered_goes_to_the_other(
    fake: FakeVLLM, kind: str, stream: bool
) -> None:
    with socket.socket() as unused, FakeVLLM("from the other") as other:
        unused.bind(("127.0.0.1", 0))
        first = fake.base_url if kind == "drop" else f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        fake.fail(1.0, ["drop"])
        with Gateway([first, other.base_url]) as gateway:
            client = openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0)
            for number in range(8):
                got = client.chat.completions.create(model="m", messages=conversation(number), stream=stream)  # type: ignore[call-overload]
                text = (
                    "".join(c.choices[0].delta.content or "" for c in got)
                    if stream
                    else got.choices[0].message.content
                )
                assert text == "from the other"
            assert len(gateway.completions) == 8
            assert len(other.bodies) == 8


class Dying(FakeVLLM):
    """Like a vLLM whose engine has died: it says 500, and that it is not well."""

    def _plain(self, method: str, path: str, raw: bytes) -> tuple[int, bytes]:
        return (503, b"") if path == "/health" else super()._plain(method, path, raw)


@pytest.mark.parametrize("stream", [False, True])
def test_the_last_words_of_a_dying_server_are_not_the_answer(stream: bool) -> None:
    with Dying() as dying, FakeVLLM("from the other") as other:
        dying.fail(1.0, ["500"])
        with Gateway([dying.base_url, other.base_url]) as gateway:
            client = openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0)
            for number in range(8):
                client.chat.completions.create(model="m", messages=conversation(number), stream=stream)  # type: ignore[call-overload]
            assert len(other.bodies) == 8
            assert gateway_health(gateway)["replicas"][0]["state"] == "down"


def test_a_servers_error_is_the_answer_while_it_is_well(fake: FakeVLLM) -> None:
    fake.fail(1.0, ["500"])
    with Gateway([fake.base_url, fake.base_url]) as gateway:
        answer = httpx.post(f"{gateway.base_url}/chat/completions", json={"model": "m", "messages": HI})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "internal error"
        assert len(fake.bodies) == 1


def test_a_server_that_came_back_is_asked_again(fake: FakeVLLM) -> None:
    fake.fail(1.0, ["drop"], times=1)
    with FakeVLLM("other") as other, Gateway([fake.base_url, other.base_url]) as gateway:
        client = openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0)

        def ask() -> bool:
            for number in range(20):
                client.chat.completions.create(model="m", messages=conversation(number))
            return fake.faults["drop"] == 1 and len(fake.bodies) > 1

        until(ask)
        assert gateway_health(gateway)["status"] == "ok"


def test_a_call_that_kills_every_server_comes_to_an_end(fake: FakeVLLM) -> None:
    fake.fail(1.0, ["drop"])
    with Gateway([fake.base_url] * 5) as gateway:
        answer = httpx.post(f"{gateway.base_url}/chat/completions", json={"model": "m", "messages": HI})
    assert answer.status_code == 502
    assert len(fake.bodies) == 3


def gateway_health(gateway: Gateway) -> dict[str, Any]:
    return httpx.get(f"{gateway.url}/health").json()


def test_health_tells_of_each_replica(fake: FakeVLLM) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        down = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with Gateway([fake.base_url, down], api_key="secret") as gateway:
            assert gateway_health(gateway) == {"status": "degraded"}
            full = httpx.get(f"{gateway.url}/health", headers={"authorization": "Bearer secret"}).json()
    assert [replica["state"] for replica in full["replicas"]] == ["up", "down"]
    assert (
        "cannot be connected to" in full["replicas"][1]["detail"]
        or "Connect" in full["replicas"][1]["detail"]
    )


# -- failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "status"), [("429", 429), ("500", 500)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_servers_refusal_comes_through_with_status_and_body(
    fake: FakeVLLM, gateway: Gateway, kind: str, status: int, stream: bool
) -> None:
    fake.fail(1.0, [kind])
    body = {"model": "m", "messages": HI, "stream": stream}
    answer = httpx.post(f"{gateway.base_url}/chat/completions", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"] in ("too many requests", "internal error")
    completion = gateway.completions.take(answer.headers[KEY_HEADER])
    assert completion.status == status
    step = only_step(completion)
    assert step.error is not None
    assert f"HTTP {status}" in step.error
    assert not step.trainable


def test_a_server_that_is_down_is_named(client: openai.OpenAI) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with Gateway(url) as gateway:
            answer = httpx.post(f"{gateway.base_url}/chat/completions", json={"model": "m", "messages": HI})
            assert answer.status_code == 502
            assert f"the server at {url} did not answer" in answer.json()["error"]["message"]
            health = httpx.get(f"{gateway.url}/health")
            assert health.status_code == 503
            assert health.json()["status"] == "down"


def test_a_connection_that_is_dropped_before_the_answer_is_a_502(fake: FakeVLLM, gateway: Gateway) -> None:
    fake.fail(1.0, ["drop"])
    answer = httpx.post(f"{gateway.base_url}/chat/completions", json={"model": "m", "messages": HI})
    assert answer.status_code == 502
    assert fake.base_url in answer.json()["error"]["message"]


def test_garbage_is_passed_on_as_it_is_and_marked(fake: FakeVLLM, gateway: Gateway) -> None:
    fake.fail(1.0, ["garbage"])
    answer = httpx.post(f"{gateway.base_url}/chat/completions", json={"model": "m", "messages": HI})
    assert (answer.status_code, answer.content) == (200, b'{"choices": [{"message": ')
    step = only_step(gateway.completions.take(answer.headers[KEY_HEADER]))
    assert step.error is not None
    assert "not a JSON object" in step.error
    assert not step.trainable


def test_a_cut_stream_is_cut_for_the_client_too_and_is_no_step_to_train(
    fake: FakeVLLM, gateway: Gateway, client: openai.OpenAI
) -> None:
    fake.fail(1.0, ["cut_stream"])
    answer = client.chat.completions.with_raw_response.create(model="m", messages=HI, stream=True)
    with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)):
        list(answer.parse())
    step = only_step(gateway.completions.take(answer.headers[KEY_HEADER]))
    assert step.error is not None
    assert "the server cut the stream" in step.error
    assert (step.tokens, step.response) == (None, None)


async def leave(gateway: Gateway, server: FakeVLLM) -> None:
    """Ask, and go away once the server has the request."""
    async with httpx.AsyncClient(timeout=60) as client:
        asked = client.post(f"{gateway.base_url}/chat/completions", json={"model": "m", "messages": HI})
        call = asyncio.create_task(asked)
        await asyncio.to_thread(until, lambda: server.bodies)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


def test_a_client_that_goes_away_ends_the_call_upstream(fake: FakeVLLM, gateway: Gateway) -> None:
    fake.fail(1.0, ["stall"])
    asyncio.run(leave(gateway, fake))
    until(lambda: fake.open_connections == 0)
    until(lambda: len(gateway.completions) == 1)
    completion = gateway.completions.take(next(iter(gateway.completions._kept)))
    assert completion.error == CLIENT_GONE


def test_a_client_that_goes_away_in_a_stream_ends_it_upstream(fake: FakeVLLM, gateway: Gateway) -> None:
    fake.script("word " * 10_000)
    fake.chunk_delay = 0.05  # ten minutes altogether
    body = {"model": "m", "messages": HI, "stream": True}
    with httpx.stream("POST", f"{gateway.base_url}/chat/completions", json=body) as answer:
        next(answer.iter_raw())
        assert fake.open_connections == 1
    until(lambda: fake.open_connections == 0)
    until(lambda: len(gateway.completions) == 1)
    step = only_step(gateway.completions.take(answer.headers[KEY_HEADER]))
    assert step.error == CLIENT_GONE
    assert step.tokens is None


def test_a_client_that_does_not_read_holds_nobody_up(fake: FakeVLLM) -> None:
    big = Reply("x" * 16_000_000, tokens=(1, 256))  # more than the sockets between them hold
    fake.script(lambda request: big if request["messages"][0]["content"] == "big" else "small")
    fake.chunk_tokens = 1_000_000
    policy = MovingPolicy(fake.base_url)
    with Gateway(policy, max_connections=1) as gateway:
        body = {"model": "agent", "messages": [{"role": "user", "content": "big"}], "stream": True}
        with httpx.stream("POST", f"{gateway.base_url}/chat/completions", json=body) as lazy:
            client = openai.OpenAI(base_url=gateway.base_url, api_key="none", timeout=120)
            answer = client.chat.completions.create(model="agent", messages=HI)
            assert answer.choices[0].message.content == "small"
            assert policy.leases.held(policy.current_version()) == 0
            assert sum(len(data) for data in lazy.iter_raw()) > len(big.text)


# -- load ----------------------------------------------------------------------------------------------


def test_first_bytes_come_before_the_server_has_the_second(fake: FakeVLLM, gateway: Gateway) -> None:
    fake.script("first second")
    fake.chunk_tokens = len("first")
    body = {"model": "m", "messages": HI, "stream": True}
    with ExitStack() as held:
        held.enter_context(fake.holding())
        url = f"{gateway.base_url}/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            pieces = answer.iter_raw()
            said = b""
            while b"first" not in said:
                said += next(pieces)
            held.close()
            assert b"[DONE]" not in said
            assert b"[DONE]" in b"".join(pieces)


async def test_more_calls_than_connections_wait_their_turn(fake: FakeVLLM) -> None:
    """C44."""
    fake.latency = 0.02
    with Gateway(fake.base_url, max_connections=8) as gateway:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=120) as client:
            body = {"model": "m", "messages": HI}
            url = f"{gateway.base_url}/chat/completions"
            answers = await asyncio.gather(*(client.post(url, json=body) for _ in range(100)))
    assert {a.status_code for a in answers} == {200}
    assert fake.max_connections <= 8


def test_the_log_drops_the_oldest_and_says_so(fake: FakeVLLM) -> None:
    with Gateway(fake.base_url, completions=CompletionLog(max_completions=2)) as gateway:
        client = openai.OpenAI(base_url=gateway.base_url, api_key="none")
        keys = [
            str(client.chat.completions.create(model="m", messages=HI).system_fingerprint) for _ in range(3)
        ]
        assert gateway.completions.dropped == 1
        with pytest.raises(CaptureError, match="was dropped unasked: at most 2 completions"):
            gateway.completions.take(keys[0])
        assert gateway.completions.take(keys[2]).error is None


def test_the_log_is_bounded_in_bytes() -> None:
    log = CompletionLog(max_bytes=1000)
    for number in range(5):
        log.put(a_completion(f"art-x-{number}", b"x" * 400))
    assert len(log) == 2
    assert log.dropped == 3


def a_completion(key: str, response: bytes) -> Completion:
    return Completion(
        key=key, path="/chat/completions", request=b"{}", response=response, model="m", policy=None,
        status=200, started_at=0.0, first_byte=None, duration=0.0,
    )  # fmt: skip


def test_a_completion_survives_the_way_to_another_process() -> None:
    sent = a_completion("art-x-1", b"\xff garbage \x00")
    assert Completion.from_json(sent.to_json()) == sent
    with pytest.raises(CaptureError, match="no completion"):
        Completion.from_json(json.dumps({"key": "k"}).encode())


def test_a_port_in_use_is_an_error_that_says_so(gateway: Gateway) -> None:
    with pytest.raises(EngineError, match=r"cannot listen on 127\.0\.0\.1:\d+ .*choose another port"):
        Gateway("http://127.0.0.1:9/v1", port=int(gateway.url.rpartition(":")[2])).start()


def test_closing_twice_does_nothing(fake: FakeVLLM) -> None:
    gateway = Gateway(fake.base_url).start()
    gateway.close()
    gateway.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{gateway.url}/health")


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
