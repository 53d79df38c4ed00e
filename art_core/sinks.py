"""Where rollouts are kept while they run.

Invariant: a step whose recording was acknowledged is in the sink.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from art_core.types import Span, Step, Trajectory

logger = logging.getLogger(__name__)


class Acknowledgement(Future[None], ABC):
    """The future of a sink that gathers writes: `hurry` says that somebody waits for this one."""

    @abstractmethod
    def hurry(self) -> None:
        """Keep what it stands for without waiting for more to keep with it."""


class Sink(Protocol):
    """Where rollouts are kept. Each future is done once what it stands for survives ``kill -9``.

    A future may be an `Acknowledgement`; whoever waits for it tells it to hurry first.
    """

    def begin(self, trajectory: Trajectory) -> Future[None]:
        """Keep a rollout that has just started (no steps yet)."""
        ...

    def append(self, step: Step) -> Future[None]:
        """Keep one step of a rollout that has begun."""
        ...

    def end(self, trajectory: Trajectory) -> Future[None]:
        """Keep how a rollout ended: status, reward, failure, duration, spans. Steps are there already."""
        ...

    def trace(self, rollout_id: str, span: Span) -> Future[None]:
        """Keep a span that came after its rollout had ended."""
        ...

    def kept(self, rollout_id: str) -> Future[Trajectory | None]:
        """What is kept of a rollout by now, its steps included; None when this sink cannot be read."""
        ...


@runtime_checkable
class GraphSink(Protocol):
    """A sink that also keeps the shapes of the graphs whose rollouts it keeps."""

    def graph(self, shape: Mapping[str, Any]) -> Future[None]:
        """Keep a graph's shape, unless it is known.

        Args:
            shape: ``{"nodes": [id], "edges": [[source, target, conditional]]}``; an id is a node's name below
                those of the nodes that enclose it, joined by ``:``.
        """
        ...


def done() -> Future[None]:
    """What needs no waiting for."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


class NullSink:
    """Keeps nothing: rollouts live in memory alone."""

    def begin(self, trajectory: Trajectory) -> Future[None]:  # noqa: D102 - the protocol says it
        return done()

    def append(self, step: Step) -> Future[None]:  # noqa: D102
        return done()

    def end(self, trajectory: Trajectory) -> Future[None]:  # noqa: D102
        return done()

    def trace(self, rollout_id: str, span: Span) -> Future[None]:  # noqa: D102
        return done()

    def kept(self, rollout_id: str) -> Future[Trajectory | None]:  # noqa: D102
        nothing: Future[Trajectory | None] = Future()
        nothing.set_result(None)
        return nothing


def wait_for(future: Future[None]) -> None:
    """Wait for an acknowledgement; raises what the sink does."""
    if isinstance(future, Acknowledgement):
        future.hurry()
    future.result()


async def settled(future: Future[None], hurry: bool = True) -> None:
    """`wait_for`, while the event loop goes on; without ``hurry`` the sink may gather more first."""
    if hurry and isinstance(future, Acknowledgement):
        future.hurry()
    if not future.done():
        # Without the shield, cancelling the waiter would cancel a write that is on its way to the disk.
        await asyncio.shield(asyncio.wrap_future(future))
    future.result()


def failed(write: Future[None]) -> bool:
    """Whether the sink has refused this."""
    return write.done() and write.exception() is not None


def say_if_lost(write: Future[None], what: str) -> None:
    """Log it if the sink refuses what nobody waits for."""

    def said(write: Future[None]) -> None:
        if (error := write.exception()) is not None:
            logger.error("%s was not kept: %s", what, error)

    write.add_done_callback(said)
