"""A callback handler that keeps nodes, tools and retrievers as spans.

Invariant: it only observes. It never raises into the graph, and never hides a fault of its own: faults are
counted on the rollout, and said once.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document

from art_core.recording import Rollout
from art_langgraph.attribution import rollout_of
from art_langgraph.identity import is_node
from art_langgraph.spans import SpanTracker

logger = logging.getLogger(__name__)

P = ParamSpec("P")
HandlerT = TypeVar("HandlerT", bound="SpanHandler")


def observing(
    event: Callable[Concatenate[HandlerT, P], None],
) -> Callable[Concatenate[HandlerT, P], None]:
    """Keep the handler's own faults out of the graph, counted and said once."""

    @functools.wraps(event)
    def observe(self: HandlerT, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            event(self, *args, **kwargs)
        except Exception:
            self.count_own_fault(event.__name__)

    return observe


@dataclass(slots=True)
class _Run:
    """What attribution wants to know of a run."""

    run_id: UUID
    parent_run_id: UUID | None
    tags: list[str]
    metadata: dict[str, Any]


class SpanHandler(BaseCallbackHandler):
    """Keeps spans.

    Args:
        rollout: where they are recorded; None: the rollout that is current where an event happens.
        spans: False keeps none.
    """

    run_inline = True
    raise_error = False

    def __init__(self, rollout: Rollout | None, *, spans: bool) -> None:
        super().__init__()
        self._rollout = rollout
        self.keeps_spans = spans
        """Whether runs become spans."""
        self.tracker = SpanTracker()
        """The spans that are open."""
        self._warned: set[str] = set()

    @observing
    def on_chain_start(
        self,
        serialized: dict[str, Any] | None,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A graph, a node or another runnable starts."""
        if metadata and is_node(kwargs.get("name"), tags or (), metadata):
            rollout = self.rollout_for(run_id, parent_run_id, tags, metadata)
            if rollout is not None:
                rollout.branches.enter_node(
                    metadata.get("langgraph_checkpoint_ns", ""), run_id, parent_run_id
                )
        self._start("chain", serialized, inputs, run_id, parent_run_id, tags, metadata, kwargs)

    @observing
    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """It has returned."""
        self.tracker.end(run_id, outputs)

    @observing
    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """It has raised, or waits for a person."""
        self.tracker.fail(run_id, error)

    @observing
    def on_tool_start(
        self,
        serialized: dict[str, Any],
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        inputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A tool starts."""
        given = input_str if inputs is None else inputs
        self._start("tool", serialized, given, run_id, parent_run_id, tags, metadata, kwargs)

    @observing
    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """It has returned."""
        self.tracker.end(run_id, output)

    @observing
    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """It has raised."""
        self.tracker.fail(run_id, error)

    @observing
    def on_retriever_start(
        self,
        serialized: dict[str, Any],
        query: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A retriever starts."""
        self._start("retriever", serialized, query, run_id, parent_run_id, tags, metadata, kwargs)

    @observing
    def on_retriever_end(self, documents: Sequence[Document], *, run_id: UUID, **kwargs: Any) -> None:
        """It has returned."""
        self.tracker.end(run_id, documents)

    @observing
    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """It has raised."""
        self.tracker.fail(run_id, error)

    def _start(
        self,
        kind: str,
        serialized: Mapping[str, Any] | None,
        inputs: Any,
        run_id: UUID,
        parent_run_id: UUID | None,
        tags: list[str] | None,
        metadata: dict[str, Any] | None,
        kwargs: Mapping[str, Any],
    ) -> None:
        if self.keeps_spans and (rollout := self.rollout_for(run_id, parent_run_id, tags, metadata)):
            name = kwargs.get("name") or (serialized or {}).get("name") or kind
            self.start_span(kind, str(name), rollout, inputs, run_id, parent_run_id, tags, metadata)

    def start_span(
        self,
        kind: str,
        name: str,
        rollout: Rollout,
        inputs: Any,
        run_id: UUID,
        parent_run_id: UUID | None,
        tags: list[str] | None,
        metadata: dict[str, Any] | None,
    ) -> None:
        """Open a span, if spans are kept."""
        if self.keeps_spans:
            self.tracker.start(
                kind, name, rollout, inputs,
                run_id=run_id, parent_run_id=parent_run_id, tags=tags, metadata=metadata,
            )  # fmt: skip

    def count_own_fault(self, event: str) -> None:
        """Count an exception of the handler's own, which is being handled; say it once for each event."""
        rollout = self._rollout or rollout_of(None)
        if rollout is not None:
            rollout.count_fault("handler_errors")
        if event not in self._warned:
            self._warned.add(event)
            logger.exception("the trajectory handler failed in %s; the graph goes on (said once)", event)

    def rollout_for(
        self,
        run_id: UUID,
        parent_run_id: UUID | None,
        tags: list[str] | None,
        metadata: dict[str, Any] | None,
    ) -> Rollout | None:
        """The rollout that an event belongs to: the handler's own, the parent's, or the current one.

        None once the handler's own has ended: a generator that its reader left leaves the handler behind in
        the reader's context.
        """
        if self._rollout is not None:
            return None if self._rollout.ended else self._rollout
        known = self.tracker.rollout_of(parent_run_id)
        return known or rollout_of(_Run(run_id, parent_run_id, tags or [], metadata or {}))
