"""A server that packs exact tokens, and one that spells them out, leave the same steps with any client."""

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from fakes.vllm_server import FakeVLLM, Reply, ToolCall, completion_ids, logprob, prompt_ids
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from art_core.chat import Completions
from art_core.inference.endpoint import StaticEndpoint, VersionLeases
from art_core.inference.gateway import Gateway
from art_core.recording import Rollout, recording
from art_core.types import PolicyVersion, Step, StepIdentity
from art_langgraph import ChatART

ANSWER = Reply("so", reasoning="let me think", tool_calls=(ToolCall("weather", '{"city":"Paris"}'),))
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=[False, True], ids=["spelled out", "packed"])
def server(request: pytest.FixtureRequest) -> Iterator[FakeVLLM]:
    with FakeVLLM("hello there", packed=request.param) as fake:
        yield fake


def chat_art(url: str) -> ChatART:
    return ChatART(StaticEndpoint(url, "m@1"), max_retries=0)


def exact(step: Step, server: FakeVLLM, reply: Reply | str) -> None:
    assert step.trainable, step.untrainable or step.error
    assert step.tokens is not None
    assert step.tokens.prompt == prompt_ids(server.bodies[-1])
    assert step.tokens.completion == completion_ids(reply)
    assert step.tokens.logprobs == tuple(logprob(t, i) for i, t in enumerate(step.tokens.completion))


def streamed(model: ChatOpenAI) -> Any:
    whole: Any = None
    for chunk in model.stream("hi"):
        whole = chunk if whole is None else whole + chunk
    return whole


WAYS: dict[str, Callable[[ChatOpenAI], Any]] = {
    "whole": lambda model: model.invoke("hi"),
    "streamed": streamed,
    "awaited": lambda model: asyncio.run(model.ainvoke("hi")),
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@every_way
@pytest.mark.parametrize("reply", ["hello there", ANSWER], ids=["text", "reasoning and a tool call"])
def test_chat_art_records_the_tokens_and_sees_none_of_them(
    server: FakeVLLM, way: Callable[[ChatOpenAI], Any], reply: Reply | str
):
    server.script(reply)
    with recording(Rollout()) as rollout:
        answer = way(chat_art(server.base_url))
    (step,) = rollout.steps
    exact(step, server, reply)
    assert "art_tokens" not in str(answer)
    assert "logprobs" not in answer.response_metadata or answer.response_metadata["logprobs"] is None
    assert server.requests[-1].headers["x-art-tokens"] == "packed"


@every_way
def test_stock_clients_are_recorded_by_the_gateway(server: FakeVLLM, way: Callable[[ChatOpenAI], Any]):
    with Gateway(server.base_url) as gateway:
        model = ChatOpenAI(model="m@1", base_url=gateway.base_url, api_key="none", max_retries=0)  # type: ignore[arg-type]
        answer = way(model)
        completion = gateway.completions.take(next(iter(gateway.completions._kept)))
    assert answer.content == "hello there"
    assert "art_tokens" not in str(answer)
    (step,) = completion.steps("t-1", StepIdentity())
    exact(step, server, "hello there")
    assert server.requests[-1].headers["x-art-tokens"] == "packed"


@every_way
def test_chat_art_gets_packed_tokens_through_the_gateway(server: FakeVLLM, way: Callable[[ChatOpenAI], Any]):
    with Gateway(server.base_url) as gateway, recording(Rollout()) as rollout:
        way(chat_art(gateway.base_url))
    (step,) = rollout.steps
    exact(step, server, "hello there")


@pytest.mark.parametrize("stream", [False, True])
def test_the_models_own_client_records_the_tokens_and_sees_none(server: FakeVLLM, stream: bool):
    version, leases = PolicyVersion("m", 1), VersionLeases()
    model = SimpleNamespace(
        name="m",
        base_url=server.base_url,
        api_key="none",
        lease=lambda asked: leases.lease(asked or version),
        wire_name=lambda leased: leased.name,
    )
    with recording(Rollout()) as rollout:
        answer = Completions(model).create(messages=HI, stream=stream)  # type: ignore[arg-type]
        seen = [chunk.to_json() for chunk in answer] if stream else [answer.to_json()]
    (step,) = rollout.steps
    exact(step, server, "hello there")
    assert not any("art_tokens" in part for part in seen)
    assert server.requests[-1].headers["x-art-tokens"] == "packed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_the_gateway_sees_the_plain_answer(server: FakeVLLM, stream: bool):
    body: dict[str, Any] = {"model": "m@1", "messages": HI, "stream": stream}
    with Gateway(server.base_url) as gateway:
        answer = httpx.post(f"{gateway.base_url}/chat/completions", json=body)
    assert answer.status_code == 200
    for ours in ("art_tokens", "token_ids"):
        assert ours not in answer.text


def test_who_asks_for_logprobs_gets_them_spelled_out(server: FakeVLLM):
    with Gateway(server.base_url) as gateway:
        client = openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0)
        answer = client.chat.completions.create(model="m@1", messages=HI, logprobs=True)  # type: ignore[arg-type]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == len(completion_ids("hello there"))
    assert "x-art-tokens" not in server.requests[-1].headers
    with recording(Rollout()) as rollout:
        chat_art(server.base_url).bind(logprobs=True).invoke("hi")
    exact(rollout.steps[0], server, "hello there")
    assert "x-art-tokens" not in server.requests[-1].headers


def test_every_choice_of_several_has_its_own_tokens(server: FakeVLLM):
    server.script(lambda _: [Reply("one"), Reply("number two")])
    with recording(Rollout()) as rollout:
        chat_art(server.base_url).generate([[HumanMessage("hi")]], n=2)
    assert [s.tokens and s.tokens.completion for s in rollout.steps] == [
        completion_ids("one"),
        completion_ids("number two"),
    ]


def test_a_stream_that_is_cut_has_no_step_to_train_on(server: FakeVLLM):
    """The tokens come last: without the end there are none, and what was read is kept with the reason."""
    server.fail(1.0, ("cut_stream",))
    with recording(Rollout()) as rollout, pytest.raises(openai.APIError):
        streamed(chat_art(server.base_url))
    (step,) = rollout.steps
    assert not step.trainable
