"""When the first token of a streamed call came: through each way in, over real HTTP, and who is told."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai
import pytest
from fakes.langfuse_server import SECRET_KEY, LangfuseServer
from fakes.vllm_server import FakeVLLM, Reply, ToolCall
from helpers.trajectories import a_step, a_trajectory
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from langfuse._client.attributes import create_generation_attributes
from starlette.testclient import TestClient

from art_core.inference.endpoint import StaticEndpoint
from art_core.inference.gateway import Gateway
from art_core.observe.dashboard.app import create_app
from art_core.recording import Rollout
from art_core.store import Store
from art_core.types import Step
from art_langgraph import ChatART, capture
from art_langgraph.langfuse.client import LangfuseClient
from art_langgraph.langfuse.connection import LangfuseConnection
from art_langgraph.langfuse.export import export_to_langfuse
from art_langgraph.langfuse.importing import import_file

HI = [{"role": "user", "content": "hi"}]
PAUSE = 0.05
"""Seconds before each chunk of a stream that holds tokens; the chunk with the role comes at once."""

RECORDED = Path(__file__).parents[1] / "data" / "langfuse_traces.json"


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    with FakeVLLM("hello there", chunk_delay=PAUSE) as server:
        yield server


@pytest.fixture
def gateway(fake: FakeVLLM) -> Iterator[Gateway]:
    with Gateway(StaticEndpoint(fake.base_url, "m@1")) as started:
        yield started


def by_chat_art(fake: FakeVLLM, gateway: Gateway, stream: bool) -> Step:
    model = ChatART(StaticEndpoint(fake.base_url, "m@1"), streaming=stream)
    with capture() as rollout:
        model.invoke("hi")
    return rollout.steps[0]


def by_chat_art_async(fake: FakeVLLM, gateway: Gateway, stream: bool) -> Step:
    async def ask() -> Step:
        model = ChatART(StaticEndpoint(fake.base_url, "m@1"), streaming=stream)
        with capture() as rollout:
            await model.ainvoke("hi")
        return rollout.steps[0]

    return asyncio.run(ask())


def by_chat_art_through_the_gateway(fake: FakeVLLM, gateway: Gateway, stream: bool) -> Step:
    model = ChatART(StaticEndpoint(gateway.base_url, "m@1"), streaming=stream)
    with capture() as rollout:
        model.invoke("hi")
    return rollout.steps[0]


def by_the_prefix_of_a_rollout(fake: FakeVLLM, gateway: Gateway, stream: bool) -> Step:
    rollout = Rollout()
    client = openai.OpenAI(base_url=gateway.register(rollout), api_key="none")
    answer = client.chat.completions.create(model="m", messages=HI, stream=stream)  # type: ignore[call-overload]
    if stream:
        list(answer)
    return rollout.steps[0]


def by_the_handler_and_the_gateway(fake: FakeVLLM, gateway: Gateway, stream: bool) -> Step:
    model = ChatOpenAI(model="m", base_url=gateway.base_url, api_key="none", streaming=stream)  # type: ignore[arg-type]
    with capture() as rollout:
        model.invoke("hi")
    return rollout.steps[0]


def by_the_handler_alone(fake: FakeVLLM, gateway: Gateway, stream: bool) -> Step:
    model = ChatOpenAI(model="m", base_url=fake.base_url, api_key="none", streaming=stream)  # type: ignore[arg-type]
    with capture() as rollout:
        model.invoke("hi")
    assert rollout.steps[0].tokens is None
    return rollout.steps[0]


WAYS = (
    by_chat_art,
    by_chat_art_async,
    by_chat_art_through_the_gateway,
    by_the_prefix_of_a_rollout,
    by_the_handler_and_the_gateway,
    by_the_handler_alone,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("said", ["hello there", ToolCall("look", '{"cell": 3}')], ids=["text", "tool call"])
def test_a_streamed_call_knows_when_its_first_token_came_and_a_whole_one_does_not(
    fake: FakeVLLM, gateway: Gateway, way: Callable[..., Step], said: Any
) -> None:
    fake.script(said if isinstance(said, str) else Reply(tool_calls=(said,)))
    streamed = way(fake, gateway, stream=True)
    assert streamed.error is None
    assert streamed.time_to_first_token is not None
    assert 0.9 * PAUSE < streamed.time_to_first_token < streamed.duration
    assert way(fake, gateway, stream=False).time_to_first_token is None


def test_a_stream_that_breaks_keeps_the_time_of_its_first_token(fake: FakeVLLM) -> None:
    fake.fail(1, ["cut_stream"])  # after two chunks: the role, and the first text
    with capture() as rollout, pytest.raises(openai.APIConnectionError):
        ChatART(StaticEndpoint(fake.base_url, "m@1"), streaming=True, max_retries=0).invoke("hi")
    (step,) = rollout.steps
    assert step.error is not None
    assert step.time_to_first_token is not None
    assert step.time_to_first_token > 0.9 * PAUSE


def test_a_model_of_any_kind_that_streams_tells_too() -> None:
    model = GenericFakeChatModel(messages=iter([AIMessage("well yes"), AIMessage("well yes")]))
    with capture() as rollout:
        list(model.stream("hi"))
        model.invoke("hi")
    streamed, whole = rollout.steps
    assert streamed.time_to_first_token is not None
    assert 0 <= streamed.time_to_first_token <= streamed.duration
    assert whole.time_to_first_token is None


# -- who is told ---------------------------------------------------------------------------------------


STREAMED = replace(a_trajectory("t-1"), steps=(a_step("t-1", time_to_first_token=0.125), a_step("t-1", 1)))


def test_langfuse_is_told_when_the_completion_began_as_its_own_sdk_tells_it(tmp_path: Path) -> None:
    with LangfuseServer() as server, Store.open("p", tmp_path) as store:
        store.save_trajectory(STREAMED)
        connection = LangfuseConnection(
            base_url=server.base_url,
            public_key=server.public_key,
            secret_key=SECRET_KEY,  # type: ignore[arg-type]
        )
        with LangfuseClient(connection) as client:
            assert export_to_langfuse(store, client=client).complete
        streamed, whole = sorted(
            (o for o in server.observations.values() if o["type"] == "GENERATION"),
            key=lambda o: o["startTime"],
        )
    moment = datetime.fromtimestamp(1000.125, UTC)
    sdk = create_generation_attributes(completion_start_time=moment)
    said = json.loads(str(sdk["langfuse.observation.completion_start_time"]))
    assert datetime.fromisoformat(streamed["completionStartTime"]) == datetime.fromisoformat(said) == moment
    assert whole["completionStartTime"] is None


def test_a_trace_of_langfuse_brings_the_time_of_its_first_token_along(tmp_path: Path) -> None:
    with Store.open("p", tmp_path) as store:
        import_file(store, RECORDED)
        steps = [step for t in store.trajectories() for step in t.steps]
    assert [s.time_to_first_token for s in steps if s.time_to_first_token is not None] == [
        pytest.approx(0.46, abs=1e-6)  # the file says 15:00.140 and 15:00.600
    ]


def test_people_see_it_in_the_terminal_in_notebooks_and_on_the_page_of_the_rollout(tmp_path: Path) -> None:
    assert STREAMED.render().count("0.12 s to first token") == 1
    assert STREAMED._repr_html_().count("0.12 s to first token") == 1
    with Store.open("p", tmp_path) as store:
        store.save_trajectory(STREAMED)
        text = TestClient(create_app(store), base_url="http://127.0.0.1").get("/trajectories/t-1").text
    assert text.count("0.12 s to first token") == 1
