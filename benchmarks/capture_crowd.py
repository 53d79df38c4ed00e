"""Very many rollouts at once; then every step of theirs is read back from the store and checked."""

import os
import resource
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_core.store import Store
from art_langgraph import Workers, agather
from benchmarks import capture_agent
from benchmarks.capture_ways import scenarios


@dataclass(frozen=True)
class Crowd:
    """What became of many rollouts at once.

    Attributes:
        seconds: from the first rollout's start to the last one's end. Processes have started and imported
            what they need before, as they have between the steps of a training run.
        growth: bytes by which this process grew at its largest; None where workers did the work.
        lost: steps that the store should hold and does not.
        misattributed: steps that the store holds under another rollout than made them, or twice.
    """

    rollouts: int
    workers: int
    seconds: float
    growth: int | None
    steps: int
    lost: int
    misattributed: int


async def crowd(server: str, rollouts: int, workers: int, directory: Path) -> Crowd:
    """Run many rollouts, all at once, and check every step of theirs in the store."""
    os.environ[capture_agent.SERVER_VARIABLE] = server
    with Store.open(f"crowd-{workers}", directory) as store:
        options: dict[str, Any] = {"group_size": 1, "concurrency": rollouts, "progress": False}
        graph: Any = capture_agent.policy_graph()
        async with AsyncExitStack() as stack:
            if workers > 1:
                graph = "benchmarks.capture_agent:policy_graph"
                options["workers"] = await stack.enter_async_context(Workers(workers))
            await agather(
                graph, scenarios(range(20), 1), sink=store.sink(), **options
            )  # imports, connections
            before = peak_memory()
            started = time.perf_counter()
            calls = capture_agent.CALLS
            await agather(graph, scenarios(range(rollouts), calls), sink=store.sink(), **options)
            seconds = time.perf_counter() - started
        growth = None if workers > 1 else peak_memory() - before
        steps, lost, misattributed = check(store, rollouts)
    return Crowd(rollouts, workers, seconds, growth, steps, lost, misattributed)


def peak_memory() -> int:
    """The most bytes of memory that this process has held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def check(store: Store, rollouts: int) -> tuple[int, int, int]:
    """Steps found, lost, and misattributed."""
    wanted = {(n, call) for n in range(rollouts) for call in range(capture_agent.CALLS)}
    found: set[tuple[int, int]] = set()
    steps = wrong = 0
    for trajectory in store.trajectories():
        if trajectory.scenario.inputs["calls"] != capture_agent.CALLS:
            continue  # of the warm-up
        number = trajectory.scenario.inputs["rollout"]
        for call, step in enumerate(trajectory.steps):
            steps += 1
            asked = capture_agent.question(number, call)
            right = step.messages[-1]["content"] == asked and step.message() == capture_agent.answer(asked)
            whole = step.trainable and step.identity.call_index == 0 and step.identity.node == "ask"
            if not (right and whole) or (number, call) in found:
                wrong += 1
            found.add((number, call))
    return steps, len(wanted - found), wrong
