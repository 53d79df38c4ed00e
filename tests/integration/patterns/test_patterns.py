"""Each pattern, by each way in, sync and async, invoked and streamed: captured exactly as its table says."""

import asyncio
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
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
    retry_subgraph,
    routing,
    streaming,
    supervisor,
    swarm,
)
from integration.patterns.compare import WAYS, Way, differences
from integration.patterns.table import Call, Pattern, Seq, calls, script_of
from integration.patterns.ways import POLICY, way_in

from art_core.recording import Rollout
from art_core.selection import superseded
from art_core.types import Trajectory

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
        retry_subgraph,
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
    if pattern.needs_handler and not way.handler:
        pytest.skip("without a handler, nobody hears that the node was retried")
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


MISTAKES: dict[str, Callable[[Call], Call]] = {
    "superstep": lambda call: replace(call, graph_step=call.graph_step + 1),
    "prompt": lambda call: replace(call, prompt=(*call.prompt, "user: and more")),
    "answer": lambda call: replace(call, answer="something else"),
    "call index": lambda call: replace(call, call_index=call.call_index + 1),
    "attempt": lambda call: replace(call, attempt=call.attempt + 1),
    "superseded": lambda call: replace(call, superseded=not call.superseded),
    "node": lambda call: replace(call, node="another"),
    "branch": lambda call: replace(call, namespace=f"{call.namespace}|deeper:1"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_table_with_one_mistake_is_not_what_was_captured(mistake: str, server: FakeVLLM) -> None:
    way = WAYS[0]
    first, *rest = calls(prompt_chaining.PATTERN.expected)
    trajectory = captured(prompt_chaining.PATTERN, way, invoke, server)

    def compared(*parts: Call) -> list[str]:
        return differences(
            trajectory.steps, Seq(*parts), way, superseded=(), policy=POLICY, requests=server.bodies
        )

    assert compared(first, *rest) == []
    assert compared(MISTAKES[mistake](first), *rest) != []
    assert compared(*rest, first) != [], "another order"
    assert compared(*rest) != [], "one call too many"
    apart = replace(rest[-1], namespace="polish:2")
    assert compared(first, *rest[:-1], apart) != [], "two branches where there was one"
