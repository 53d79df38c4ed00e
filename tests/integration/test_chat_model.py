"""ChatART against a scripted vLLM over real HTTP: whatever the way in, the step has the server's tokens."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypedDict

import openai
import pytest
from fakes.vllm_server import FakeVLLM, Reply, ToolCall, completion_ids, prompt_ids
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.runnables import ConfigurableField, Runnable
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from art_core.errors import ConfigError, RolloutTooLongError
from art_core.inference.endpoint import StaticEndpoint, VersionLeases
from art_core.recording import NullSink, Rollout, Sink, recording
from art_core.types import PolicyVersion, Step
from art_langgraph import ChatART

WEATHER = ToolCall("get_weather", '{"city":"Paris"}')


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM("hello there") as fake:
        yield fake


def chat_for(server: FakeVLLM, **kwargs: Any) -> ChatART:
    return ChatART(StaticEndpoint(server.base_url, "m@1"), **{"max_retries": 0, **kwargs})


@contextmanager
def recorded(**kwargs: Any) -> Iterator[Rollout]:
    with recording(Rollout(**kwargs)) as rollout:
        yield rollout


def merged(whole: Any, chunk: Any) -> Any:
    if isinstance(whole, dict) and isinstance(chunk, dict):
        return {**whole, **chunk}
    return whole + chunk if isinstance(whole, AIMessageChunk) else chunk


async def ainvoke(model: Runnable[Any, Any], text: str) -> Any:
    return await model.ainvoke(text)


async def astream(model: Runnable[Any, Any], text: str) -> Any:
    whole = None
    async for chunk in model.astream(text):
        whole = merged(whole, chunk)
    return whole


def stream(model: Runnable[Any, Any], text: str) -> Any:
    whole = None
    for chunk in model.stream(text):
        whole = merged(whole, chunk)
    return whole


WAYS: dict[str, Callable[[Runnable[Any, Any], str], Any]] = {
    "invoke": lambda model, text: model.invoke(text),
    "ainvoke": lambda model, text: asyncio.run(ainvoke(model, text)),
    "stream": stream,
    "astream": lambda model, text: asyncio.run(astream(model, text)),
    "batch": lambda model, text: model.batch([text])[0],
    "abatch": lambda model, text: asyncio.run(model.abatch([text]))[0],  # type: ignore[arg-type]
    "stream=True": lambda model, text: model.bind(stream=True).invoke(text),
}

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def only(rollout: Rollout) -> Step:
    (step,) = rollout.steps
    return step


def exact(step: Step, server: FakeVLLM, reply: Reply | str) -> None:
    assert step.trainable, step.untrainable or step.error
    assert step.tokens is not None
    assert step.tokens.completion == completion_ids(reply)
    assert step.tokens.prompt == prompt_ids(server.bodies[-1])
    assert len(step.tokens.completion) == step.usage["completion_tokens"]


@every_way
def test_each_way_in_records_the_servers_tokens(server: FakeVLLM, way: Callable[..., Any]):
    with recorded() as rollout:
        answer = way(chat_for(server, temperature=0.7), "hi")
    assert answer.content == "hello there"
    assert answer.usage_metadata["output_tokens"] == len(completion_ids("hello there"))
    step = only(rollout)
    exact(step, server, "hello there")
    assert step.messages == ({"role": "user", "content": "hi"},)
    assert step.sampling == {"temperature": 0.7}
    assert step.policy == PolicyVersion("m", 1)
    assert step.response == {"role": "assistant", "content": "hello there"}
    assert step.identity.run_id is not None


@every_way
def test_reasoning_and_tool_calls_are_all_there(server: FakeVLLM, way: Callable[..., Any]):
    """C03."""
    reply = Reply("so", reasoning="let me think", tool_calls=(WEATHER, ToolCall("now", "{}")))
    server.script(reply)
    with recorded() as rollout:
        answer = way(chat_for(server), "hi")
    assert answer.additional_kwargs["reasoning_content"] == "let me think"
    assert [(c["name"], c["args"]) for c in answer.tool_calls] == [
        ("get_weather", {"city": "Paris"}),
        ("now", {}),
    ]
    step = only(rollout)
    exact(step, server, reply)
    assert step.response is not None
    assert step.response["tool_calls"][0]["function"]["arguments"] == WEATHER.arguments, "as it was sampled"
    assert step.response["reasoning_content"] == "let me think"


@every_way
def test_malformed_tool_calls_are_steps_and_invalid_tool_calls(server: FakeVLLM, way: Callable[..., Any]):
    """C08."""
    reply = Reply(tool_calls=(ToolCall("get_weather", '{"city": '),))
    server.script(reply)
    with recorded() as rollout:
        answer = way(chat_for(server), "hi")
    if isinstance(answer, AIMessage) and answer.invalid_tool_calls:  # streams complete partial JSON
        assert answer.invalid_tool_calls[0]["args"] == '{"city": '
    exact(only(rollout), server, reply)


def test_malformed_tool_calls_look_as_they_do_with_chat_open_ai(server: FakeVLLM):
    """C08."""
    server.script(Reply(tool_calls=(ToolCall("get_weather", '{"city": '),)))
    stock = ChatOpenAI(model="m@1", base_url=server.base_url, api_key="x")  # type: ignore[arg-type]
    ours, theirs = chat_for(server).invoke("hi"), stock.invoke("hi")
    assert ours.invalid_tool_calls
    assert ours.invalid_tool_calls == theirs.invalid_tool_calls
    assert ours.tool_calls == theirs.tool_calls == []


class Weather(BaseModel):
    city: str


class WeatherDict(TypedDict):
    city: str


WEATHER_SCHEMA = {
    "title": "Weather",
    "description": "a place",
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


@pytest.mark.parametrize("way", [WAYS["invoke"], WAYS["ainvoke"], WAYS["stream"], WAYS["astream"]])
@pytest.mark.parametrize("include_raw", [False, True])
@pytest.mark.parametrize("schema", [Weather, WeatherDict, WEATHER_SCHEMA], ids=["pydantic", "typed", "dict"])
@pytest.mark.parametrize("method", ["function_calling", "json_mode", "json_schema"])
@pytest.mark.parametrize("parses", [True, False])
def test_structured_output_yields_its_step(
    server: FakeVLLM, method: Any, schema: Any, include_raw: bool, way: Callable[..., Any], parses: bool
):
    """C01."""
    text = '{"city":"Paris"}' if parses else '{"city"'
    name = "WeatherDict" if schema is WeatherDict else "Weather"
    reply = Reply(tool_calls=(ToolCall(name, text),)) if method == "function_calling" else Reply(text)
    server.script(reply)
    model = chat_for(server).with_structured_output(schema, method=method, include_raw=include_raw)
    with recorded() as rollout:
        try:
            answer: Any = way(model, "hi")
        except Exception:
            assert not parses, "what parses is not an error"
        else:
            if parses:
                parsed = answer["parsed"] if include_raw else answer
                assert parsed == (Weather(city="Paris") if schema is Weather else {"city": "Paris"})
    exact(only(rollout), server, reply)


def test_bound_settings_reach_the_wire_as_with_chat_open_ai(server: FakeVLLM):
    """C04."""
    tool = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}

    def variants(model: Any) -> list[Runnable[Any, Any]]:
        choosable = model.configurable_fields(temperature=ConfigurableField(id="heat"))
        return [
            model.bind_tools([tool], tool_choice="f", parallel_tool_calls=False, strict=True),
            model.bind_tools([tool], tool_choice="any"),
            model.bind(stop=["x"]),
            model.with_retry(stop_after_attempt=2),
            model.with_config(tags=["t"], configurable={}),
            choosable.with_config(configurable={"heat": 0.25}),
            model.with_fallbacks([model]),
            model.bind(max_tokens=3, seed=7, extra_body={"min_p": 0.1}, extra_headers={"x-mine": "1"}),
            model.bind(response_format={"type": "json_object"}),
        ]

    settings: dict[str, Any] = {"temperature": 1.0, "max_retries": 0}
    theirs = ChatOpenAI(model="m@1", base_url=server.base_url, api_key="x", **settings)  # type: ignore[arg-type]
    ours = chat_for(server, **settings)
    before = repr(ours)
    for ours_too, theirs_too in zip(variants(ours), variants(theirs), strict=True):
        ours_too.invoke("hi")
        theirs_too.invoke("hi")
        sent, expected = (dict(b) for b in server.bodies[-2:])
        assert sent.pop("logprobs") is True
        assert sent.pop("return_token_ids") is True
        assert sent == expected
    assert repr(ours) == before, "nothing shared was changed"
    assert "x-art-exchange" not in server.requests[-1].headers
    assert any(r.headers.get("x-mine") for r in server.requests)


@every_way
def test_messages_of_every_kind_reach_the_wire_as_with_chat_open_ai(
    server: FakeVLLM, way: Callable[..., Any]
):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    call = {"name": "get_weather", "args": {"city": "Paris"}, "id": "c1"}
    talk: Any = [
        SystemMessage("be brief"),
        HumanMessage([{"type": "text", "text": "see"}, picture], name="ann"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("sunny", tool_call_id="c1"),
        AIMessage("It is sunny."),
        ChatMessage("and \u00e9?", role="user"),
    ]
    theirs = ChatOpenAI(
        model="m@1",
        base_url=server.base_url,
        api_key="x",  # type: ignore[arg-type]
        stream_usage=True,
        http_async_client=openai.DefaultAsyncHttpxClient(),
    )
    way(chat_for(server), talk)
    way(theirs, talk)
    sent, expected = (body["messages"] for body in server.bodies[-2:])
    assert len(sent) == 6
    assert sent == expected


@every_way
def test_a_graph_sees_what_it_would_with_chat_open_ai(server: FakeVLLM, way: Callable[..., Any]):
    server.script(Reply("hello", tool_calls=(WEATHER,)))
    stock = ChatOpenAI(
        model="m@1",
        base_url=server.base_url,
        api_key="x",  # type: ignore[arg-type]
        stream_usage=True,
        http_async_client=openai.DefaultAsyncHttpxClient(),  # the shared one is good for one loop
    )

    def plain(message: Any) -> dict[str, Any]:
        dumped = json.loads(message.model_dump_json(exclude={"id"}))
        dumped["response_metadata"].pop("id", None)
        return dumped

    assert plain(way(chat_for(server), "hi")) == plain(way(stock, "hi"))


def test_logprobs_are_seen_by_those_who_ask(server: FakeVLLM):
    with recorded() as rollout:
        plain = chat_for(server).invoke("hi")
        asked = chat_for(server, logprobs=True).invoke("hi")
    assert plain.response_metadata["logprobs"] is None
    assert len(asked.response_metadata["logprobs"]["content"]) == len(completion_ids("hello there"))
    assert [s.sampling for s in rollout.steps] == [{}, {"logprobs": True}]
    assert all(s.trainable for s in rollout.steps)


def test_choices_of_one_call_are_steps_of_one_call(server: FakeVLLM):
    server.script(lambda request: ["one", "two", "three"])
    with recorded() as rollout:
        result = chat_for(server, n=3).generate([[HumanMessage("hi")]])
    assert [g.text for g in result.generations[0]] == ["one", "two", "three"]
    assert [s.message() for s in rollout.steps] == ["one", "two", "three"]
    assert len({s.call_id for s in rollout.steps}) == 1


def test_multimodal_blocks_pass_through(server: FakeVLLM):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with recorded() as rollout:
        chat_for(server).invoke([HumanMessage([{"type": "text", "text": "see"}, picture])])
    assert only(rollout).messages[0]["content"] == [{"type": "text", "text": "see"}, picture]


@every_way
def test_usage_is_counted_where_the_server_sends_none(server: FakeVLLM, way: Callable[..., Any]):
    server.usage = False
    with recorded() as rollout:
        answer = way(chat_for(server), "hi")
    assert answer.usage_metadata["output_tokens"] == len(completion_ids("hello there"))
    assert only(rollout).usage["completion_tokens"] == len(completion_ids("hello there"))


@pytest.mark.parametrize("missing", ["token_ids", "logprobs"])
@every_way
def test_a_server_without_exact_tokens_gives_untrainable_steps(
    server: FakeVLLM, way: Callable[..., Any], missing: str
):
    setattr(server, missing, False)
    with recorded() as rollout:
        assert way(chat_for(server), "hi").content == "hello there"
    step = only(rollout)
    assert not step.trainable
    assert step.untrainable is not None
    assert missing.replace("_", " ") in step.untrainable


def test_two_event_loops_one_after_the_other(server: FakeVLLM):
    """C09."""
    model = chat_for(server)
    with recorded() as rollout:
        for _ in range(3):
            assert asyncio.run(ainvoke(model, "hi")).content == "hello there"
            assert asyncio.run(astream(model, "hi")).content == "hello there"
        assert model.invoke("hi").content == "hello there"
    assert len(rollout.steps) == 7


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
