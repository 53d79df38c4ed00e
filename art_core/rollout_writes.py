"""What a rollout has its sink keep: its beginning, its steps, its spans and its end.

Invariant: a write that failed (a full disk) is repeated: the beginning before the next step, steps before the
end. So a rollout ends with all that it recorded in the sink, or does not end.
"""

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from art_core.sinks import GraphSink, Sink, done, failed, say_if_lost, wait_for
from art_core.types import Span, Step, Trajectory

logger = logging.getLogger(__name__)


class RolloutWrites:
    """One rollout's writes. Thread-safe: `append` and `trace` come from any thread while another ends it.

    Args:
        rollout_id: whose they are.
        sink: where they go.
        beginning: the rollout as it is now; asked when its beginning is written, or written again.
        known: what the sink has of a rollout that goes on; its beginning is then there.
    """

    def __init__(
        self,
        rollout_id: str,
        sink: Sink,
        beginning: Callable[[], Trajectory],
        known: Trajectory | None = None,
    ) -> None:
        self._rollout_id = rollout_id
        self._sink = sink
        self._beginning = beginning
        self._lock = threading.Lock()
        self._steps: list[tuple[Step, Future[None]]] = []
        self._traced = frozenset(span.id for span in known.spans) if known else frozenset[str]()
        self._begun = done() if known else self._begin()

    def _begin(self) -> Future[None]:
        return self._sink.begin(replace(self._beginning(), steps=(), spans=()))

    def _begin_again_if_failed(self) -> None:
        if not failed(self._begun):
            return
        with self._lock:
            if failed(self._begun):  # no other thread was quicker
                self._begun = self._begin()

    def append(self, step: Step, *, late: bool) -> Future[None]:
        """Keep a step; one that is late comes after the end, which did not wait for it."""
        self._begin_again_if_failed()
        write = self._sink.append(step)
        if late:
            say_if_lost(write, f"late step {step.id} of rollout {self._rollout_id}")
        else:
            self._steps.append((step, write))
        return write

    def trace(self, span: Span) -> None:
        """Keep a span that came after the end."""
        say_if_lost(
            self._sink.trace(self._rollout_id, span), f"late span {span.id} of rollout {self._rollout_id}"
        )

    def note_graph(self, shape: Mapping[str, Any]) -> None:
        """Keep the shape of the graph that runs, where the sink keeps such (`art_core.sinks.GraphSink`)."""
        if isinstance(self._sink, GraphSink):
            say_if_lost(self._sink.graph(shape), f"the shape of the graph of rollout {self._rollout_id}")

    def repeat(self) -> Generator[Future[None], None, int | None]:
        """Write again what failed; yields each write that must be waited for, whatever its outcome.

        Returns:
            How many steps failed again; None when nothing had failed.
        """
        if not failed(self._begun) and not any(failed(write) for _, write in self._steps):
            return None
        self._begin_again_if_failed()
        for i, (step, write) in enumerate(self._steps):  # in place: another thread may be adding one
            if failed(write):
                self._steps[i] = step, self._sink.append(step)
        for _, write in self._steps:
            yield write
        return sum(failed(write) for _, write in self._steps)

    def end(self, ended: Trajectory) -> Generator[Future[None]]:
        """Write the end; yields each write that must be waited for, whatever its outcome.

        Raises:
            StoreError: the sink refuses it.
        """
        # Before waiting for the beginning: they share a transaction.
        end = self._sink.end(replace(ended, spans=tuple(self._untraced(ended.spans))))
        for write in (self._begun, end):
            yield write
            write.result()
        for step, write in self._steps:
            yield write
            if failed(write):  # for ever: whatever ails the sink would have hit the end, too
                logger.error(
                    "step %s of rollout %s was not kept: %s", step.id, self._rollout_id, write.exception()
                )

    def flush(self, spans: Iterable[Span]) -> None:
        """Wait until the beginning, all steps and these spans are kept, without an end.

        Raises:
            StoreError: the sink refuses one of them.
        """
        for write in (self._begun, *(write for _, write in self._steps)):
            wait_for(write)
        for span in self._untraced(spans):
            wait_for(self._sink.trace(self._rollout_id, span))
            self._traced |= {span.id}

    def _untraced(self, spans: Iterable[Span]) -> Iterable[Span]:
        return (span for span in spans if span.id not in self._traced)
