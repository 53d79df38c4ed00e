"""Each pattern, by each way in, sync and async, invoked and streamed: captured exactly as its table says."""

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from fakes.vllm_server import FakeVLLM
from integration.patterns import (
    evaluator_optimizer,
    functional,
    human_approval,
    map_reduce,
    orchestrator_worker,
    parallelisation,
    prompt_chaining,
    react,
    retry,
    routing,
    streaming,
    supervisor,
    swarm,
)
from integration.patterns.compare import WAYS, Way, differences
from integration.patterns.table import Pattern, calls, script_of
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from art_core.inference.endpoint import StaticEndpoint
from art_core.inference.gateway import Gateway
from art_core.recording import Rollout, recording
from art_core.selection import superseded
from art_core.types import PolicyVersion, Trajectory
from art_langgraph import ChatART, capture

POLICY = PolicyVersion("policy", 3)

PATTERNS = {
    module.__name__.rpartition(".")[2]: module.PATTERN
    for module in (
        prompt_chaining,
        parallelisation,
        routing,
        react,
        orchestrator_worker,
        evaluator_optimizer,
        supervisor,
        swarm,
        map_reduce,
        human_approval,
        retry,
        functional,
        streaming,
    )
}

Drive = Callable[[Any, Sequence[Any], dict[str, Any]], None]
"""Runs a graph on inputs, one after the other: ``(graph, inputs, config)``."""


def invoke(graph: Any, inputs: Sequence[Any], config: dict[str, Any]) -> None:
    for given in inputs:
        graph.invoke(given, config)


def ainvoke(graph: Any, inputs: Sequence[Any], config: dict[str, Any]) -> None:
    async def run() -> None:
        for given in inputs:
            await graph.ainvoke(given, config)

    asyncio.run(run())


def stream(graph: Any, inputs: Sequence[Any], config: dict[str, Any]) -> None:
    for given in inputs:
        for _ in graph.stream(given, config, stream_mode="messages", subgraphs=True):
            pass


def astream(graph: Any, inputs: Sequence[Any], config: dict[str, Any]) -> None:
    async def run() -> None:
        for given in inputs:
            async for _ in graph.astream(given, config, stream_mode="messages", subgraphs=True):
                pass

    asyncio.run(run())


MODES: tuple[Drive, ...] = (invoke, ainvoke, stream, astream)


@contextmanager
def way_in(way: Way, server: FakeVLLM, rollout: Rollout) -> Generator[BaseChatModel]:
    """A chat model whose calls are recorded into the rollout."""
    endpoint = StaticEndpoint(server.base_url, POLICY.name)
    match way.name:
        case "chatart":
            with recording(rollout):
                yield ChatART(endpoint)
        case "chatart_and_handler":
            with capture(rollout=rollout):
                yield ChatART(endpoint)
        case "gateway":
            with Gateway(endpoint) as gateway, capture(rollout=rollout):
                yield stock(gateway.base_url)
        case "handler":
            with capture(rollout=rollout):
                yield stock(server.base_url)
        case other:
            raise ValueError(other)


def stock(base_url: str) -> BaseChatModel:
    return ChatOpenAI(model=POLICY.name, base_url=base_url, api_key=SecretStr("none"))


def captured(pattern: Pattern, way: Way, drive: Drive, server: FakeVLLM) -> Trajectory:
    """Run a pattern as one rollout."""
    server.script(script_of(pattern.expected))
    rollout = Rollout()
    with way_in(way, server, rollout) as llm:
        asynchronous = drive in (ainvoke, astream)
        graph = (pattern.abuild if asynchronous and pattern.abuild else pattern.build)(llm)
        drive(graph, pattern.inputs, {"configurable": {"thread_id": rollout.id}})
    return rollout.finish()


@pytest.fixture
def server() -> Generator[FakeVLLM]:
    with FakeVLLM() as server:
        yield server


@pytest.mark.parametrize("drive", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_captured_as_its_table_says(name: str, way: Way, drive: Drive, server: FakeVLLM) -> None:
    pattern = PATTERNS[name]
    trajectory = captured(pattern, way, drive, server)
    assert trajectory.faults == {}
    assert (
        differences(
            trajectory.steps,
            pattern.expected,
            way,
            superseded=superseded(trajectory.steps),
            policy=POLICY,
            requests=server.bodies,
        )
        == []
    )


@pytest.mark.parametrize("name", PATTERNS)
def test_no_two_rows_of_a_table_are_alike(name: str) -> None:
    rows = [call.row for call in calls(PATTERNS[name].expected)]
    assert len(set(rows)) == len(rows)
