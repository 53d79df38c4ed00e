"""GraphNode: a node of a LangGraph that is written once, and runs in sync and async graphs.

Invariant: a node tells its progress to whoever streams the graph with ``stream_mode="custom"``, and works the
same when nobody does, or when it is called outside of a graph.
"""

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.config import get_stream_writer

from art_core.errors import ConfigError
from art_core.recording import Sink
from art_core.store import Store
from art_core.sync import run_sync

if TYPE_CHECKING:
    from art_core.model import TrainableModel

T = TypeVar("T")


class Recorded(Protocol):
    """Something with a record of its own: a `TrainableModel`, once it is registered."""

    @property
    def store(self) -> Store:
        """The record."""
        ...

    @property
    def sink(self) -> Sink:
        """Where its rollouts go."""
        ...


Record = Store | Recorded
"""A store, or a model that has one."""


def store_of(record: "Record | TrainableModel") -> Store:
    """The store itself; asked for when it is needed, since a model may be registered later."""
    return record if isinstance(record, Store) else record.store


def check_record(record: object) -> None:
    """Refuse a store's name in place of the store, before anything runs.

    Raises:
        ConfigError: it is one.
    """
    if record is None or isinstance(record, str | Path):
        raise ConfigError(f"{record!r} is no record: give Store.open(project), or a model, to use its own")


def sink_of(record: "Record | TrainableModel") -> Sink:
    """Where rollouts are kept."""
    return record.sink() if isinstance(record, Store) else record.sink


class GraphNode(Runnable[Any, Any], ABC):
    """A node: state in, update out. Give it to ``StateGraph.add_node`` like a function."""

    @abstractmethod
    async def act(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What the node does; returns an update of the state."""

    async def ainvoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """`act`, as LangChain calls it."""
        return await self.act(input)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        """`act` from a sync graph."""
        return run_sync(lambda: self.act(input))


class FunctionNode(GraphNode):
    """A node made of an async function.

    Args:
        function: ``state -> update``.
        name: for traces.
    """

    def __init__(
        self, function: Callable[[Mapping[str, Any]], Coroutine[Any, Any, dict[str, Any]]], name: str
    ) -> None:
        self._function = function
        self.name = name

    async def act(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Call the function."""
        return await self._function(state)


def tell(event: str, **what: Any) -> None:
    """Tell whoever streams the graph (``stream_mode="custom"``)."""
    try:
        write = get_stream_writer()
    except (RuntimeError, KeyError):  # outside of a graph
        return
    write({"event": event, **what})


async def outside_the_graph(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine as if no graph were running around it.

    A graph that is invoked in a node becomes that node's subgraph: it gets the parent's checkpointer,
    namespace, callbacks and streaming, and its interrupts stop the parent. A rollout is a run of its own.
    """
    context = contextvars.copy_context()
    context.run(var_child_runnable_config.set, None)
    return await asyncio.create_task(make(), context=context)
