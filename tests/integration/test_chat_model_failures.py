"""ChatART when things go wrong: every failure is a step with its cause; nothing hangs or is invented."""

import asyncio
import contextvars
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fakes.vllm_server import FAULTS, FakeVLLM, Reply

from art_core.inference.endpoint import StaticEndpoint
from art_core.recording import Rollout, recording
from art_core.types import Step
from art_langgraph import ChatART


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with FakeVLLM("a longer answer, in several chunks") as fake:
        yield fake


def chat_for(server: FakeVLLM, **kwargs: Any) -> ChatART:
    return ChatART(StaticEndpoint(server.base_url, "m@1"), **{"max_retries": 0, "timeout": 0.5, **kwargs})


async def call(chat: ChatART, *, streaming: bool) -> str:
    if not streaming:
        return str((await chat.ainvoke("hi")).content)
    return "".join([str(chunk.content) async for chunk in chat.astream("hi")])


def sync_call(chat: ChatART, *, streaming: bool) -> str:
    if not streaming:
        return str(chat.invoke("hi").content)
    return "".join(str(chunk.content) for chunk in chat.stream("hi"))


def only(rollout: Rollout) -> Step:
    (step,) = rollout.steps
    return step


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_a_step_with_its_cause(server: FakeVLLM, fault: str, use_async: bool, streaming: bool):
    server.fail(1, (fault,))
    chat = chat_for(server)

    def attempt() -> str:
        if use_async:
            return asyncio.run(call(chat, streaming=streaming))
        return sync_call(chat, streaming=streaming)

    with recording(Rollout()) as rollout, pytest.raises(Exception) as raised:  # noqa: PT011 - OpenAI's many
        attempt()
    step = only(rollout)
    assert step.error is not None
    assert (step.tokens, step.trainable, step.untrainable) == (None, False, "the call failed")
    assert step.messages == ({"role": "user", "content": "hi"},)
    assert step.policy is not None
    said = {"429": "HTTP 429", "500": "HTTP 500", "stall": "Timeout", "garbage": "not JSON"}
    assert said.get(fault, "") in step.error, (step.error, raised.value)
    server.fail(0)
    with recording(Rollout()) as after:
        assert sync_call(chat, streaming=streaming)
    assert only(after).trainable, "the next call is well"


def test_a_request_that_the_sdk_repeats_is_one_step_and_counted(server: FakeVLLM):
    server.script("fine")
    server.fail(1, ("500",), times=1)
    chat = chat_for(server, max_retries=2)
    with recording(Rollout()) as rollout:
        assert chat.invoke("hi").content == "fine"
    assert only(rollout).trainable
    assert rollout.finish().faults == {"retried_requests": 1}


def test_a_stream_that_its_reader_leaves_is_not_an_answer(server: FakeVLLM):
    server.chunk_delay = 0.01
    chat = chat_for(server)

    async def leave() -> None:
        async for chunk in chat.astream("hi"):
            if chunk.content:
                break

    with recording(Rollout()) as rollout:
        asyncio.run(leave())
        stream = chat.stream("hi")
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    assert [s.trainable for s in rollout.steps] == [False, False]
    assert [s.error for s in rollout.steps] == ["the stream ended before the completion did"] * 2


async def test_a_cancelled_call_is_recorded_and_gives_its_connection_back(server: FakeVLLM):
    server.latency = 240
    chat = chat_for(server, timeout=240, max_connections=1)
    with recording(Rollout()) as rollout:
        running = asyncio.create_task(call(chat, streaming=False))
        waiting = asyncio.create_task(call(chat, streaming=False))
        while not server.bodies:
            await asyncio.sleep(0.005)
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        server.latency = 0
        assert await call(chat, streaming=False)
    first, second, third = rollout.steps
    assert "CancelledError" in (first.error or "")
    assert "CancelledError" in (second.error or "")
    assert third.trainable


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
async def test_five_hundred_calls_at_once_share_few_connections(server: FakeVLLM, streaming: bool):
    """C44."""
    server.latency = 0.02
    chat = chat_for(server, timeout=60, max_connections=32)

    async def one() -> Rollout:
        with recording(Rollout()) as rollout:
            await call(chat, streaming=streaming)
        return rollout

    rollouts = await asyncio.gather(*(one() for _ in range(500)))
    assert all(only(r).trainable for r in rollouts)
    assert server.max_connections <= 32


def test_threads_share_few_connections_too(server: FakeVLLM):
    """C44."""
    server.latency = 0.01
    others = threading.active_count()
    with recording(Rollout()) as rollout, ThreadPoolExecutor(64) as pool:
        chats = [chat_for(server, timeout=60, max_connections=8) for _ in range(200)]
        runs = [pool.submit(contextvars.copy_context().run, sync_call, c, streaming=False) for c in chats]
        assert all(run.result() for run in runs)
    assert len(rollout.steps) == 200
    assert server.max_connections <= 8
    assert threading.active_count() - others < 70


async def test_under_faults_every_step_is_whole_or_failed(server: FakeVLLM):
    server.fail(0.1, ("drop", "429", "500", "garbage", "cut_stream"), seed=3)
    chat = chat_for(server, timeout=60)

    async def one(number: int) -> Rollout:
        with recording(Rollout()) as rollout:
            for turn in range(3):
                try:
                    await call(chat, streaming=(number + turn) % 2 == 0)
                except Exception:  # the SDK's, httpx's and json's are as many as the faults
                    continue
        return rollout

    rollouts = await asyncio.gather(*(one(n) for n in range(100)))
    steps = [s for r in rollouts for s in r.steps]
    assert len(steps) == 300
    whole = Reply("a longer answer, in several chunks")
    outcomes = Counter("whole" if s.trainable else "failed" for s in steps)
    assert outcomes["failed"] == sum(server.faults.values()) > 10
    for step in steps:
        if step.trainable:
            assert step.message() == whole.text
        else:
            assert step.error
