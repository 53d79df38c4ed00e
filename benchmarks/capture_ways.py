"""The ways in, each as a function that runs rollouts; and taking turns between them."""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from art_core.inference.endpoint import StaticEndpoint
from art_core.store import Store
from art_core.types import Scenario
from art_langgraph import ChatART, agather, capture
from benchmarks import capture_agent

MODEL = capture_agent.MODEL


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        repetitions: by concurrency.
        rollouts: of one measurement, by concurrency.
        calls: of one rollout, by concurrency.
        first_bytes: streamed requests, each way.
        crowd: rollouts at once in the last part.
    """

    repetitions: dict[int, int] = field(default_factory=lambda: {1: 25, 32: 9, 500: 1})
    rollouts: dict[int, int] = field(default_factory=lambda: {1: 20, 32: 64, 500: 500})
    calls: dict[int, int] = field(default_factory=lambda: {1: 5, 32: 5, 500: 2})
    first_bytes: int = 300
    crowd: int = 2000


QUICK = Sizes(
    repetitions={1: 3, 32: 2, 500: 1},
    rollouts={1: 5, 32: 32, 500: 100},
    calls={1: 5, 32: 2, 500: 1},
    first_bytes=50,
    crowd=100,
)

Numbers = Iterable[int]
Run = Callable[[Numbers, int, int], Awaitable[None]]
"""Runs the rollouts of these numbers: ``(numbers, calls, concurrency)``."""


def scenarios(numbers: Numbers, calls: int) -> list[Scenario]:
    return [Scenario(f"r{n}", {"rollout": n, "calls": calls}) for n in numbers]


def uncaptured(graph: Any) -> Run:
    """As many rollouts at a time as are allowed, by asyncio alone."""

    async def run(numbers: Numbers, calls: int, concurrency: int) -> None:
        free = asyncio.Semaphore(concurrency)

        async def one(scenario: Scenario) -> None:
            async with free:
                await graph.ainvoke(dict(scenario.inputs))

        await asyncio.gather(*map(one, scenarios(numbers, calls)))

    return run


def captured(graph: Any, store: Store) -> Run:
    """The rollout runner with a model that records by itself, everything into the store."""

    async def run(numbers: Numbers, calls: int, concurrency: int) -> None:
        groups = await agather(
            graph,
            scenarios(numbers, calls),
            group_size=1,
            concurrency=concurrency,
            sink=store.sink(),
            progress=False,
        )
        if broken := groups.failed:
            raise RuntimeError(f"{len(broken)} rollouts failed; the first: {broken[0].failure}")

    return run


def handled(graph: Any, store: Store) -> Run:
    """A rollout with the handler around each run of the graph, everything into the store."""

    async def run(numbers: Numbers, calls: int, concurrency: int) -> None:
        free = asyncio.Semaphore(concurrency)

        async def one(scenario: Scenario) -> None:
            async with free, capture(scenario, sink=store.sink()):
                await graph.ainvoke(dict(scenario.inputs))

        await asyncio.gather(*map(one, scenarios(numbers, calls)))

    return run


def ways_in(server: str, gateway: str, store: Store) -> dict[str, Run]:
    """Every way in, by its name."""

    def stock(url: str) -> Any:
        return capture_agent.build(ChatOpenAI(model=MODEL, base_url=url, api_key=SecretStr("none")))

    policy = ChatART(StaticEndpoint(server, MODEL, sink=store.sink()))
    return {
        "stock": uncaptured(stock(server)),
        "handler": handled(stock(server), store),
        "chatart": captured(capture_agent.build(policy), store),
        "gateway": handled(stock(gateway), store),
    }


async def compare(ways: dict[str, Run], concurrency: int, sizes: Sizes) -> dict[str, list[float]]:
    """Seconds per call of each way, repetition by repetition; ways take turns, each time in another order."""
    rollouts, calls = sizes.rollouts[concurrency], sizes.calls[concurrency]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for run in ways.values():
        await run(range(rollouts), calls, concurrency)  # connections, imports, caches
    for repetition in range(sizes.repetitions[concurrency]):
        turn = repetition % len(ways)
        for way in (*list(ways)[turn:], *list(ways)[:turn]):
            gc.collect()
            started = time.perf_counter()
            await ways[way](range(rollouts), calls, concurrency)
            seconds[way].append((time.perf_counter() - started) / (rollouts * calls))
    return seconds


async def first_bytes(urls: dict[str, str], requests: int) -> dict[str, list[float]]:
    """Seconds until the first byte of a streamed answer's body, the URLs in turn."""
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "rollout 1, call 1"}]}
    seconds: dict[str, list[float]] = {name: [] for name in urls}
    async with httpx.AsyncClient(trust_env=False) as client:
        for _ in range(requests):
            for name, url in urls.items():
                started = time.perf_counter()
                async with client.stream("POST", f"{url}/chat/completions", json=body) as response:
                    response.raise_for_status()
                    pieces = response.aiter_raw()
                    await anext(pieces)
                    seconds[name].append(time.perf_counter() - started)
                    async for _ in pieces:
                        pass
    return seconds
