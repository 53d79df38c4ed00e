"""The gateway before versions of a policy that moves, and before several servers."""

import socket
import threading
from typing import Any

import httpx
import openai
import pytest
from fakes.vllm_server import FakeVLLM
from helpers.gateways import HI, MovingPolicy, only_step, until

from art_core.errors import CaptureError
from art_core.inference.endpoint import StaticEndpoint
from art_core.inference.gateway import Gateway
from art_core.inference.gateway_proxy import KEY_HEADER, POLICY_HEADER
from art_core.recording import ROLLOUT_HEADER, Rollout
from art_core.types import PolicyVersion

# -- versions ------------------------------------------------------------------------------------------


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
