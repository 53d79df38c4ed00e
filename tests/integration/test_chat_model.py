"""ChatART against a scripted vLLM over real HTTP: whatever the way in, the step has the server's tokens."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import openai
import pytest
from fakes.vllm_server import FakeVLLM, Reply, ToolCall, completion_ids
from helpers.chat_art import ainvoke, astream, chat_for, exact, only, recorded, stream
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.runnables import ConfigurableField, Runnable
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from art_core.types import PolicyVersion

WEATHER = ToolCall("get_weather", '{"city":"Paris"}')


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM("hello there") as fake:
        yield fake


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
