"""ChatART and its policy: versions, addresses, limits, seeds, and clients of the user."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.vllm_server import FakeVLLM, ToolCall
from helpers.chat_art import ainvoke, chat_for, recorded, stream
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache

from art_core.errors import ConfigError, RolloutTooLongError
from art_core.inference.endpoint import StaticEndpoint, VersionLeases
from art_core.recording import NullSink, Rollout, Sink, recording
from art_core.types import PolicyVersion
from art_langgraph import ChatART

WEATHER = ToolCall("get_weather", '{"city":"Paris"}')


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM("hello there") as fake:
        yield fake


class Moving:
    """A policy whose current version moves."""

    api_key = "secret"

    def __init__(self, base_url: str) -> None:
        self.name = "m"
        self.base_url = base_url
        self.sink: Sink = NullSink()
        self.version = 0
        self.leases = VersionLeases()

    def current_version(self) -> PolicyVersion:
        return PolicyVersion("m", self.version)

    def lease(self, version: PolicyVersion | None = None) -> Any:
        return self.leases.lease(version or self.current_version())


def test_calls_go_to_the_version_of_the_moment(server: FakeVLLM):
    """C06."""
    policy = Moving(server.base_url)
    model = ChatART(policy)
    with recorded() as rollout:
        for version in (0, 2):
            policy.version = version
            model.invoke("hi")
            stream(model, "hi")
    assert [b["model"] for b in server.bodies] == ["m@0", "m@0", "m@2", "m@2"]
    assert [s.policy and s.policy.number for s in rollout.steps] == [0, 0, 2, 2]
    assert server.requests[0].headers["authorization"] == "Bearer secret"


def test_a_pinned_rollout_stays_on_its_first_version_and_holds_it(server: FakeVLLM):
    policy = Moving(server.base_url)
    model = ChatART(policy, pin_version=True)
    with recorded() as rollout:
        model.invoke("hi")
        policy.version = 2
        model.invoke("hi")
        assert policy.leases.held(PolicyVersion("m", 0)) == 1
    with recorded() as other:
        model.invoke("hi")
    assert [s.policy and s.policy.number for s in rollout.steps] == [0, 0]
    assert [s.policy and s.policy.number for s in other.steps] == [2]
    rollout.finish()
    assert policy.leases.held(PolicyVersion("m", 0)) == 0


def test_a_version_is_leased_while_its_call_runs(server: FakeVLLM):
    policy = Moving(server.base_url)
    held: list[int] = []

    def reply(request: dict[str, Any]) -> str:
        held.append(policy.leases.held(PolicyVersion("m", 0)))
        return "ok"

    server.script(reply)
    ChatART(policy).invoke("hi")
    stream(ChatART(policy), "hi")
    assert held == [1, 1]
    assert policy.leases.held(PolicyVersion("m", 0)) == 0


def test_a_version_can_be_asked_for_by_name(server: FakeVLLM):
    policy = Moving(server.base_url)
    policy.version = 5
    with recorded() as rollout:
        ChatART(policy).invoke("hi", model="m@3")
        ChatART(policy).invoke("hi", model="judge")
    assert [b["model"] for b in server.bodies] == ["m@3", "judge"]
    first, second = rollout.steps
    assert first.policy == PolicyVersion("m", 3)
    assert (second.policy, second.trainable) == (None, False)


def test_an_address_that_moves_is_followed(server: FakeVLLM):
    class Unready(Moving):
        @property
        def base_url(self) -> str:  # type: ignore[override]
            if not self.address:
                raise ConfigError("not registered")
            return self.address

        @base_url.setter
        def base_url(self, value: str) -> None:
            self.address = value

    policy = Unready("")
    model = ChatART(policy)
    policy.base_url = server.base_url
    assert model.invoke("hi").content == "hello there"


def test_a_cache_hit_is_recorded_as_untrainable(server: FakeVLLM):
    """C02: where the calls went."""
    set_llm_cache(InMemoryCache())
    try:
        model = chat_for(server)
        model.invoke("hi")
        with recorded() as rollout:
            model.invoke("hi")
            asyncio.run(ainvoke(model, "hi"))
        assert len(server.bodies) == 1
        assert [(s.trainable, s.message()) for s in rollout.steps] == [(False, "hello there")] * 2
        assert all("cache hit" in (s.untrainable or "") for s in rollout.steps)
    finally:
        set_llm_cache(None)


def test_a_rollout_may_make_so_many_calls_and_no_more(server: FakeVLLM):
    model = chat_for(server)
    with recorded(max_calls=2) as rollout:
        model.invoke("hi")
        model.invoke("hi")
        with pytest.raises(RolloutTooLongError, match="2 policy calls"):
            model.invoke("hi")
    assert len(server.bodies) == len(rollout.steps) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "gpt-5"}, "contradicts the policy 'm'"),
        ({"base_url": "http://elsewhere/v1"}, "StaticEndpoint"),
        ({"use_responses_api": True}, "chat completions"),
    ],
)
def test_settings_that_contradict_the_policy_are_refused(
    server: FakeVLLM, settings: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        chat_for(server, **settings)


def test_a_name_or_an_address_is_no_policy():
    named: Any = "http://127.0.0.1:8000/v1"
    with pytest.raises(ConfigError, match=r"StaticEndpoint\(base_url, model\)"):
        ChatART(named)


def test_a_client_of_the_users_own_carries_the_calls(server: FakeVLLM):
    import httpx

    seen: list[str] = []
    mine = httpx.Client(event_hooks={"request": [lambda r: seen.append(str(r.url))]})
    with recorded() as rollout:
        chat_for(server, http_client=mine).invoke("hi")
        stream(chat_for(server, http_client=mine), "hi")
    assert seen == [f"{server.base_url}/chat/completions"] * 2
    assert [s.trainable for s in rollout.steps] == [True, True]


# -- seeds -------------------------------------------------------------------------------------------


async def test_calls_of_a_seeded_rollout_are_sent_with_seeds() -> None:
    with FakeVLLM("fine") as server:
        llm = ChatART(StaticEndpoint(server.base_url, "m@0"))
        chosen = ChatART(StaticEndpoint(server.base_url, "m@0"), seed=7)
        for metadata in ({"seed": 3}, {"seed": 3}, {}):
            with recording(Rollout(metadata=metadata)):
                await llm.ainvoke("a")
                await llm.ainvoke("b")
                await chosen.ainvoke("c")
        seeds = [body.get("seed") for body in server.bodies]
    first, again, unseeded = seeds[:3], seeds[3:6], seeds[6:]
    assert first == again
    assert first[2] == 7
    assert len(set(first)) == 3
    assert unseeded == [None, None, 7]
