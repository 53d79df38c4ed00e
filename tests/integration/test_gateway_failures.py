"""The gateway when servers fail, clients go away, and very many come at once."""

import asyncio
import json
import socket
from contextlib import ExitStack

import httpx
import openai
import pytest
from fakes.vllm_late import LateVLLM
from fakes.vllm_server import FakeVLLM, Reply
from helpers.gateways import HI, MovingPolicy, leave, only_step, until

from art_core.errors import CaptureError, EngineError
from art_core.inference.availability import MAX_LIVES
from art_core.inference.endpoint import StaticEndpoint
from art_core.inference.gateway import Gateway
from art_core.inference.gateway_log import Completion, CompletionLog
from art_core.inference.gateway_proxy import CLIENT_GONE, KEY_HEADER


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


def ask(gateway: Gateway, **request: object) -> httpx.Response:
    body = {"model": "m", "messages": HI, **request}
    return httpx.post(f"{gateway.base_url}/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["drop", "unknown"])
def test_an_address_that_others_restart_is_asked_again_though_it_was_back_before_anybody_looked(
    fault: str, stream: bool
) -> None:
    kind = LateVLLM if fault == "unknown" else FakeVLLM
    with kind("here it is", models=["m@1"]) as server:
        if fault == "drop":
            server.fail(1.0, ["drop"], times=1)
        with Gateway(StaticEndpoint(server.base_url, "m@1", patience=30)) as gateway:
            answer = ask(gateway, stream=stream)
        assert answer.status_code == 200
        assert ("[DONE]" if stream else "here it is") in answer.text
        assert len(server.requests) == 2


def test_an_address_that_drops_every_call_is_asked_a_few_times_and_no_more(fake: FakeVLLM) -> None:
    fake.models = ["m@1"]
    fake.fail(1.0, ["drop"])
    with Gateway(StaticEndpoint(fake.base_url, "m@1", patience=30)) as gateway:
        assert ask(gateway).status_code == 502
        asked = len(fake.requests)
        assert 1 < asked <= MAX_LIVES
        assert ask(gateway, model="unknown").status_code == 502
        fake.fail(0.0, ["drop"])
        assert ask(gateway, model="unknown").status_code == 404
        assert len(fake.requests) <= 2 * asked + 1


def test_a_call_whose_model_does_not_come_back_is_under_way_no_more(fake: FakeVLLM) -> None:
    fake.models = ["another"]
    with Gateway(StaticEndpoint(fake.base_url, "m@1", patience=0.1)) as gateway:
        answer = ask(gateway)
        assert answer.status_code == 503
        assert "did not serve m@1 again" in answer.json()["error"]["message"]
        (replica,) = httpx.get(f"{gateway.url}/health").json()["replicas"]
        assert replica["in_flight"] == 0


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
