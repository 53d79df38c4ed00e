"""What the design takes for granted about calls that end oddly: cancelled, late, from a cache.

One that fails here changes the design.
"""

import asyncio
from contextlib import suppress
from typing import Any

from helpers.stock_agents import thread
from helpers.stock_openai import openai_model
from helpers.watched_graphs import State, Watcher, ambient, one_node, says
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import GenericFakeChatModel


class Stuck(GenericFakeChatModel):
    """Never answers."""

    started: Any = None

    async def _agenerate(self, *args: Any, **options: Any) -> Any:
        self.started.set()
        await asyncio.Event().wait()


async def test_a_cancelled_call_has_a_start_and_no_end() -> None:
    watcher = Watcher()
    stuck = Stuck(messages=iter([]), started=asyncio.Event())
    call = asyncio.create_task(stuck.ainvoke("hi", {"callbacks": [watcher]}))
    await stuck.started.wait()
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call
    assert (len(watcher.starts), watcher.ends, watcher.errors) == (1, [], [])


async def test_a_background_task_of_a_node_ends_after_its_graph() -> None:
    watcher = Watcher()
    go_on = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def later() -> None:
        await go_on.wait()
        await says("late").ainvoke("hi")

    async def node(state: State) -> State:
        tasks.append(asyncio.create_task(later()))
        return {"said": ["x"]}

    with ambient(watcher):
        await one_node(node).ainvoke({}, thread())
    assert watcher.starts == []
    go_on.set()
    await tasks[0]
    assert len(watcher.ends) == 1


def test_a_cache_hit_has_a_start_and_an_end_but_no_request() -> None:
    requests: list[dict[str, Any]] = []
    model = openai_model(requests, cache=InMemoryCache())
    watcher = Watcher()
    model.invoke("hi", {"callbacks": [watcher]})
    model.invoke("hi", {"callbacks": [watcher]})
    assert (len(watcher.starts), len(watcher.ends), len(requests)) == (2, 2, 1)
    hit = watcher.ends[1].generations[0][0]
    assert hit.message.usage_metadata["total_cost"] == 0, "this is how a hit can be told"
    assert hit.message.response_metadata["system_fingerprint"] == "fp-1", "so a key can come twice"
