"""Each pattern, by each way in, sync and async, invoked and streamed, is captured exactly as its table says."""

import asyncio
from collections.abc import Callable, Generator
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

from art_core.inference.endpoint import StaticEndpoint
from art_core.recording import Rollout, recording
from art_core.selection import superseded
from art_core.types import PolicyVersion, Trajectory
from art_langgraph import ChatART

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

Drive = Callable[[Any, Any, dict[str, Any]], None]
"""Runs a graph once: ``(graph, input, config)``."""


def invoke(graph: Any, given: Any, config: dict[str, Any]) -> None:
    graph.invoke(given, config)


def ainvoke(graph: Any, given: Any, config: dict[str, Any]) -> None:
    asyncio.run(graph.ainvoke(given, config))


def stream(graph: Any, given: Any, config: dict[str, Any]) -> None:
    for _ in graph.stream(given, config, stream_mode="messages", subgraphs=True):
        pass


def astream(graph: Any, given: Any, config: dict[str, Any]) -> None:
    async def run() -> None:
        async for _ in graph.astream(given, config, stream_mode="messages", subgraphs=True):
            pass

    asyncio.run(run())


MODES: tuple[Drive, ...] = (invoke, ainvoke, stream, astream)


@contextmanager
def way_in(way: Way, server: FakeVLLM, rollout: Rollout) -> Generator[BaseChatModel]:
    """A chat model whose calls are recorded into the rollout."""
    with recording(rollout):
        yield ChatART(StaticEndpoint(server.base_url, POLICY.name))


def captured(pattern: Pattern, way: Way, drive: Drive, server: FakeVLLM) -> Trajectory:
    """Run a pattern as one rollout."""
    server.script(script_of(pattern.expected))
    rollout = Rollout()
    with way_in(way, server, rollout) as llm:
        asynchronous = drive in (ainvoke, astream)
        graph = (pattern.abuild if asynchronous and pattern.abuild else pattern.build)(llm)
        for given in pattern.inputs:
            drive(graph, given, {"configurable": {"thread_id": rollout.id}})
    return rollout.finish()


@pytest.fixture
def server() -> Generator[FakeVLLM]:
    with FakeVLLM() as server:
        yield server


@pytest.mark.parametrize("drive", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("way", WAYS[:1], ids=lambda way: way.name)
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
