"""Clients that know a server's address alone, and are told to be patient with it."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fakes.vllm_late import LateVLLM
from fakes.vllm_server import FakeVLLM

from art_core.errors import EngineError
from art_core.inference.availability import MAX_LIVES
from art_core.inference.endpoint import StaticEndpoint
from art_core.recording import Rollout, recording
from art_langgraph import ChatART


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM("here it is", models=["m@1"]) as fake:
        yield fake


def ask(server: FakeVLLM, use_async: bool, **settings: Any) -> str:
    patience = settings.pop("patience", 30)
    address = StaticEndpoint(server.base_url, "m@1", patience=patience)
    chat = ChatART(address, **{"max_retries": 0, "timeout": 30, **settings})
    return asyncio.run(chat.ainvoke("hi")).text if use_async else chat.invoke("hi").text


BOTH = pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])


@BOTH
def test_a_dropped_connection_is_sent_again_to_a_server_that_was_back_before_anybody_looked(
    server: FakeVLLM, use_async: bool
):
    server.fail(1, ("drop",), times=1)
    with recording(Rollout()) as rollout:
        assert ask(server, use_async) == "here it is"
    (step,) = rollout.steps
    assert step.trainable
    assert len(server.requests) == 2


@BOTH
def test_a_model_that_was_not_known_yet_and_is_now_is_asked_again(use_async: bool):
    with LateVLLM("here it is", models=["m@1"]) as server:
        assert ask(server, use_async) == "here it is"
        assert len(server.requests) == 2


@BOTH
def test_a_server_that_breaks_over_a_request_and_goes_on_is_not_asked_again(
    server: FakeVLLM, use_async: bool
):
    server.fail(1, ("500",))
    with pytest.raises(openai.InternalServerError):
        ask(server, use_async)
    assert len(server.requests) == 1


@BOTH
def test_a_server_that_drops_every_connection_is_asked_a_few_times_and_no_more(
    server: FakeVLLM, use_async: bool
):
    server.fail(1, ("drop",))
    with pytest.raises(openai.APIConnectionError):
        ask(server, use_async)
    assert len(server.requests) == MAX_LIVES


@BOTH
def test_a_time_that_ran_out_is_not_sent_again(server: FakeVLLM, use_async: bool):
    server.fail(1, ("stall",))
    with pytest.raises(openai.APITimeoutError):
        ask(server, use_async, timeout=0.5)
    assert len(server.requests) == 1


@BOTH
def test_without_patience_a_dropped_connection_is_the_client_s_affair(server: FakeVLLM, use_async: bool):
    server.fail(1, ("drop",), times=1)
    with pytest.raises(openai.APIConnectionError):
        ask(server, use_async, patience=0)


@BOTH
def test_a_server_that_serves_something_else_now_is_not_waited_for_for_ever(
    server: FakeVLLM, use_async: bool
):
    server.models = ["another"]
    server.fail(1, ("drop",))
    with pytest.raises((EngineError, openai.APIConnectionError)) as raised:
        ask(server, use_async, patience=0.1)
    assert "did not serve m@1 again within 0.1 s" in f"{raised.value} {raised.value.__cause__}"
