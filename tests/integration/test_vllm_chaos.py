"""Rollouts while their server is killed again and again: it takes longer, and nothing else happens.

A fake vLLM, but a real process at a real port, restarted as the real one is; the real LangGraph over ChatART.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import httpx
import openai
import pytest
from fakes.vllm_interpreter import fake_interpreter
from fakes.vllm_server import completion_ids
from helpers.engine_endpoint import EngineEndpoint
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from art_core.config import EngineConfig, LoRAConfig
from art_core.errors import EngineError
from art_core.inference.endpoint import StaticEndpoint
from art_core.inference.engine import EngineEvent
from art_core.inference.gateway import Gateway
from art_core.inference.vllm import VLLMEngine
from art_core.recording import Rollout, set_current_rollout
from art_core.store import Store
from art_core.types import PolicyVersion, Scenario, Trajectory
from art_langgraph import ChatART, agather

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX")

V1 = PolicyVersion("agent", 1)
SAID = "answered by agent@1"


class Policy(EngineEndpoint):
    """Version 1 of a policy on a fake vLLM, whose process can be killed."""

    engine: VLLMEngine

    def kill(self) -> None:
        process = self.engine._keeper.process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def policy(
    tmp_path: Path, store: Store | None = None, run: str = "", latency: float = 0.0, **settings: Any
) -> Any:
    def keep(event: EngineEvent) -> None:
        if store is not None:
            store.add_event(run, event.kind, event.message, event.data)

    config = EngineConfig(
        python=fake_interpreter(tmp_path / "fake", "answers", latency=latency),
        **{"max_restarts": 30, **settings},
    )
    logs = tmp_path / "logs"
    engine = VLLMEngine("org/model", config, LoRAConfig(rank=8), "agent", logs, on_event=keep)
    endpoint = Policy(engine, tmp_path / "adapters", sink=None if store is None else store.sink(run))
    endpoint.adapter_dir(1).mkdir(parents=True)
    (endpoint.adapter_dir(1) / "adapter_config.json").write_text(json.dumps({"r": 8}))
    await engine.start()
    try:
        await endpoint.publish(1)
        yield endpoint
    finally:
        await engine.close()


class State(TypedDict):
    topic: str
    said: list[str]


CALLS = 3


def build(llm: Any) -> Any:
    async def ask(state: State) -> State:
        answer = await llm.ainvoke(f"{state['topic']}, part {len(state['said'])}")
        return {"topic": state["topic"], "said": [*state["said"], answer.text]}

    graph = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", lambda s: "ask" if len(s["said"]) < CALLS else END, ["ask", END])
    return graph.compile()


def reward(trajectory: Trajectory, output: State) -> float:
    return float(len(output["said"]))


KILLS, SCENARIOS, GROUP = 10, 25, 8


async def test_ten_kills_during_two_hundred_rollouts_lose_and_double_nothing(tmp_path: Path):
    """C43."""
    store = Store.open("chaos", tmp_path)
    run = store.begin_run("agent", {})
    ended, killed = 0, 0
    async with policy(tmp_path, store, run, latency=0.02) as endpoint:

        def count(progress: Any) -> None:
            nonlocal ended
            ended = progress.done

        async def kill() -> None:
            nonlocal killed
            for number in range(KILLS):
                while ended < number * (SCENARIOS * GROUP // KILLS) or not endpoint.engine.versions():
                    await asyncio.sleep(0.005)
                endpoint.kill()
                killed += 1
                while len(store.events(run, "engine_restarted")) < killed:
                    await asyncio.sleep(0.02)

        killer = asyncio.create_task(kill())
        groups = await agather(
            build(ChatART(endpoint, max_retries=0)),
            [Scenario(f"s{i}", {"topic": f"topic {i}", "said": []}) for i in range(SCENARIOS)],
            group_size=GROUP,
            reward=reward,
            concurrency=16,
            sink=endpoint.sink,
            progress=count,
        )
        await killer

    assert killed == KILLS
    assert [len(group) for group in groups] == [GROUP] * SCENARIOS
    assert not groups.failed
    rollouts = [trajectory for group in groups for trajectory in group]
    kept = list(store.trajectories(run))
    assert Counter(t.id for t in kept) == Counter(t.id for t in rollouts)
    for trajectory in kept:
        assert trajectory.reward == CALLS
        assert [step.message() for step in trajectory.steps] == [SAID] * CALLS
        assert all(step.trainable and step.policy == V1 for step in trajectory.steps)
        parts = [step.messages[0]["content"].rpartition(" ")[2] for step in trajectory.steps]
        assert parts == ["0", "1", "2"], "each call is there once"
    repeated = sum(trajectory.faults.get("retried_requests", 0) for trajectory in rollouts)
    assert repeated >= KILLS, "the server was killed under calls"
    restarts = store.events(run, "engine_restarted")
    assert len(restarts) == KILLS == len(store.events(run))
    for event in restarts:
        assert event.data["cause"] == "vLLM was ended by SIGKILL: killed from outside"
        assert event.data["versions"] == ["agent@1"]
        assert Path(event.data["log"]).exists()
    store.close()


async def test_worker_processes_which_know_an_address_alone_wait_as_well(tmp_path: Path):
    with Store.open("workers", tmp_path) as store:
        run = store.begin_run("agent", {})
        async with policy(tmp_path, store, run, latency=0.05) as endpoint:

            async def kill() -> None:
                for number in range(3):
                    while sum(1 for _ in store.trajectories(run)) <= number * 6:
                        await asyncio.sleep(0.02)
                    endpoint.kill()
                    while len(store.events(run)) <= number:
                        await asyncio.sleep(0.02)

            killer = asyncio.create_task(kill())
            groups = await agather(
                "helpers.rollout_graphs:chat_graph",
                [Scenario(f"s{i}", {"topic": f"topic {i}"}) for i in range(10)],
                group_size=4,
                reward="helpers.rollout_graphs:length",
                concurrency=8,
                workers=2,
                model=endpoint,
                sink=endpoint.sink,
            )
            await killer
        assert not groups.failed
        kept = {t.id: t for t in store.trajectories(run)}
        assert kept.keys() == {t.id for group in groups for t in group}
        assert all([s.message() for s in t.steps] == [SAID] * 2 for t in kept.values())


# -- each way in ---------------------------------------------------------------------------------------


@pytest.fixture
def rollout() -> Iterator[Rollout]:
    rollout = Rollout(Scenario("s"))
    set_current_rollout(rollout)
    yield rollout
    set_current_rollout(None)


async def chat_art(endpoint: Policy) -> str:
    return (await ChatART(endpoint, max_retries=0).ainvoke("hi")).text


async def chat_art_in_a_thread(endpoint: Policy) -> str:
    return (await asyncio.to_thread(ChatART(endpoint, max_retries=0).invoke, "hi")).text


async def chat_art_streaming(endpoint: Policy) -> str:
    return "".join([chunk.text async for chunk in ChatART(endpoint, max_retries=0).astream("hi")])


async def another_process(endpoint: Policy) -> str:
    """It knows the address alone."""
    address = StaticEndpoint(endpoint.base_url, "agent@1", patience=60)
    return await chat_art(address)  # type: ignore[arg-type]


async def stock_client_through_a_gateway(endpoint: Policy) -> str:
    with Gateway(endpoint) as gateway:
        client = ChatOpenAI(base_url=gateway.base_url, api_key="none", model="agent", max_retries=0)  # type: ignore[arg-type]
        return (await client.ainvoke("hi")).text


async def stock_stream_through_a_gateway(endpoint: Policy) -> str:
    with Gateway(endpoint) as gateway:
        client = ChatOpenAI(base_url=gateway.base_url, api_key="none", model="agent", max_retries=0)  # type: ignore[arg-type]
        return "".join([chunk.text async for chunk in client.astream("hi")])


WAYS = [
    chat_art,
    chat_art_in_a_thread,
    chat_art_streaming,
    another_process,
    stock_client_through_a_gateway,
    stock_stream_through_a_gateway,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_call_whose_server_is_killed_under_it_is_answered_by_the_next(
    tmp_path: Path, rollout: Rollout, way: Callable[..., Any]
):
    async with policy(tmp_path, latency=0.5) as endpoint:
        call = asyncio.create_task(way(endpoint))
        log = endpoint.engine.log_path
        assert log is not None
        while "asked" not in log.read_text():
            assert not call.done(), call.result()
            await asyncio.sleep(0.01)
        endpoint.kill()
        assert await call == SAID
    steps = rollout.snapshot().steps
    if "gateway" not in way.__name__:
        (step,) = steps
        assert step.trainable
        assert step.tokens is not None
        assert step.tokens.completion == completion_ids(SAID)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_call_while_the_server_is_down_waits_for_it(
    tmp_path: Path, rollout: Rollout, way: Callable[..., Any]
):
    async with policy(tmp_path) as endpoint:
        endpoint.kill()
        while endpoint.engine.versions():
            await asyncio.sleep(0.01)
        assert await way(endpoint) == SAID


@pytest.mark.parametrize(
    "way", [chat_art, chat_art_in_a_thread, stock_client_through_a_gateway], ids=lambda way: way.__name__
)
async def test_a_call_for_a_version_that_the_server_lost_gets_it_back(
    tmp_path: Path, rollout: Rollout, way: Callable[..., Any]
):
    async with policy(tmp_path) as endpoint:
        httpx.post(f"{endpoint.base_url}/unload_lora_adapter", json={"lora_name": "agent@1"})
        assert await way(endpoint) == SAID


async def test_a_call_that_kills_every_server_ends_before_the_budget_does(tmp_path: Path, rollout: Rollout):
    async with policy(tmp_path) as endpoint:
        with pytest.raises(openai.APIConnectionError):
            await ChatART(endpoint, max_retries=0).ainvoke("die")
        assert await chat_art(endpoint) == SAID
    first, _ = rollout.snapshot().steps
    assert first.error is not None
    assert "closed the connection" in first.error


async def test_a_server_that_answers_health_and_nothing_else_is_restarted(
    tmp_path: Path, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("art_core.inference.vllm_keeper.LOOK_SECONDS", 0.1)
    store = Store.open("chaos", tmp_path)
    run = store.begin_run("agent", {})
    async with policy(tmp_path, store, run, stall_timeout=1.0) as endpoint:
        assert (await ChatART(endpoint, max_retries=0).ainvoke("stick")).text == SAID
    restarts = store.events(run)  # more than one where the machine stalls by itself
    assert {event.kind for event in restarts} == {"engine_restarted"}
    assert {event.data["cause"] for event in restarts} == {"vLLM ended no step for 1 s while requests ran"}
    store.close()


async def test_a_call_whose_server_may_not_be_restarted_fails_at_once_and_says_why(
    tmp_path: Path, rollout: Rollout
):
    async with policy(tmp_path, max_restarts=0) as endpoint:
        endpoint.kill()
        with pytest.raises((EngineError, openai.APIConnectionError)):  # as the SDK's version has it
            await ChatART(endpoint, max_retries=0).ainvoke("hi")
        with Gateway(endpoint) as gateway:
            client = openai.AsyncOpenAI(base_url=gateway.base_url, api_key="none", max_retries=0)
            with pytest.raises(openai.InternalServerError, match=r"SIGKILL(.*\n)+.*max_restarts=0"):
                await client.chat.completions.create(model="agent", messages=[])
    (step,) = rollout.snapshot().steps
    assert step.error is not None
    assert "SIGKILL" in step.error
    assert "max_restarts=0" in step.error
