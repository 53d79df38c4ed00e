"""Whatever is streamed of a graph: what is captured does not depend on it, and the stream stays as it was."""

import asyncio
from typing import Any

import pytest
from fakes.vllm_server import FakeVLLM
from integration.patterns import streaming
from integration.patterns.compare import WAYS, Way, differences
from integration.patterns.table import calls, script_of
from integration.patterns.ways import POLICY, way_in

from art_core.recording import Rollout
from art_core.selection import superseded

PATTERN = streaming.PATTERN
CONFIG = {"configurable": {"thread_id": "1"}}

STREAM_MODES = (
    "values",
    "updates",
    "messages",
    "custom",
    "debug",
    "tasks",
    "checkpoints",
    ["updates", "messages"],
)


def sync_stream(graph: Any, **options: Any) -> list[Any]:
    return list(graph.stream(PATTERN.inputs[0], CONFIG, **options))


def async_stream(graph: Any, **options: Any) -> list[Any]:
    async def run() -> list[Any]:
        return [event async for event in graph.astream(PATTERN.inputs[0], CONFIG, **options)]

    return asyncio.run(run())


def events(graph: Any, **options: Any) -> list[Any]:
    async def run() -> list[Any]:
        return [
            event async for event in graph.astream_events(PATTERN.inputs[0], CONFIG, version="v2", **options)
        ]

    return asyncio.run(run())


def problems(way: Way, server: FakeVLLM, run: Any, **options: Any) -> tuple[list[Any], list[str]]:
    """What the user's loop got, and how the captured steps differ from the table."""
    server.script(script_of(PATTERN.expected))
    rollout = Rollout()
    with way_in(way, server, rollout) as llm:
        asynchronous = run is not sync_stream
        graph = (PATTERN.abuild if asynchronous and PATTERN.abuild else PATTERN.build)(llm)
        got = run(graph, **options)
    trajectory = rollout.finish()
    gone = superseded(trajectory.steps)
    found = differences(
        trajectory.steps, PATTERN.expected, way, superseded=gone, policy=POLICY, requests=server.bodies
    )
    return got, found + [f"fault: {kind}" for kind in trajectory.faults]


@pytest.mark.parametrize("run", [sync_stream, async_stream], ids=lambda run: run.__name__)
@pytest.mark.parametrize("mode", STREAM_MODES, ids=str)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_stream_mode_is_captured(way: Way, mode: Any, run: Any) -> None:
    with FakeVLLM() as server:
        got, found = problems(way, server, run, stream_mode=mode, subgraphs=True)
    assert found == []
    assert got, "the user's loop got nothing"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_the_events_of_a_run_are_captured(way: Way) -> None:
    with FakeVLLM() as server:
        got, found = problems(way, server, events)
    assert found == []
    assert sum(event["event"] == "on_chat_model_stream" for event in got) > len(list(calls(PATTERN.expected)))


@pytest.mark.parametrize("run", [sync_stream, async_stream], ids=lambda run: run.__name__)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_streamed_pieces_put_together_are_the_answers(way: Way, run: Any) -> None:
    with FakeVLLM() as server:
        got, _ = problems(way, server, run, stream_mode="messages", subgraphs=True)
    said: dict[str, str] = {}
    for _, (chunk, metadata) in got:
        said[metadata["langgraph_node"]] = said.get(metadata["langgraph_node"], "") + chunk.text
    answers = {call.namespace.split("|")[-1].split(":")[0]: call.answer for call in calls(PATTERN.expected)}
    assert said == answers


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_stream_that_its_reader_leaves_keeps_what_was_called(way: Way) -> None:
    with FakeVLLM() as server:
        server.script(script_of(PATTERN.expected))
        rollout = Rollout()
        with way_in(way, server, rollout) as llm:
            graph = PATTERN.build(llm)
            for _ in graph.stream(PATTERN.inputs[0], CONFIG, stream_mode="updates", subgraphs=True):
                break
        nodes = [step.identity.node for step in rollout.finish().steps]
    assert nodes[:1] == ["think"]
