"""Bringing metrics from the store to sinks, while a run goes on or when it is over.

Invariant: training waits for no sink and fails with none; a sink gets each step once and in order, and what
it did not get by the end is told.

Each sink has a thread. A thread that is woken reads from the store what its sink lacks, so that a slow sink
falls behind and catches up, a sink that was down gets what it missed, and nothing piles up in memory. A
failure is logged and becomes an event once, and the sink is tried again at every step.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from art_core.errors import StoreError
from art_core.observe.sinks.base import MetricSink, MetricWriter, SinkRun
from art_core.store import Run, RunState, Store

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
"""How long the end of a run waits for sinks that are behind."""


@dataclass(frozen=True, slots=True)
class Undelivered:
    """What a sink did not get.

    Attributes:
        sink: its name.
        steps: numbers of the training steps.
        reason: why.
    """

    sink: str
    steps: tuple[int, ...]
    reason: str


class Delivery:
    """Keeps sinks up to date with a run.

    Args:
        store: where the metrics are.
        run_id: of the run; those that it continues are delivered, too.
        sinks: where the metrics go.
        directory: for sinks that write files and were not told where.
    """

    def __init__(self, store: Store, run_id: str, sinks: Sequence[MetricSink], directory: Path) -> None:
        self._store = store
        self._run = run_id
        source = _Source(store, run_id, directory)
        self._couriers = [_Courier(source, sink) for sink in sinks]
        for courier in self._couriers:
            courier.start()

    def notify(self) -> None:
        """There is something new in the store."""
        for courier in self._couriers:
            courier.wake()

    def close(self, state: RunState | None, timeout: float = CLOSE_SECONDS) -> list[Undelivered]:
        """Bring the rest, and close the sinks.

        Args:
            state: how the run ended.
            timeout: seconds to wait for all of them together.

        Returns:
            What was not delivered; it is an event of the run, too.
        """
        for courier in self._couriers:
            courier.finish(state)
        until = time.monotonic() + timeout
        for courier in self._couriers:
            courier.join(max(0.0, until - time.monotonic()))
        lost = [missed for courier in self._couriers if (missed := courier.undelivered(timeout)) is not None]
        for missed in lost:
            message = (
                f"sink {missed.sink} lacks {len(missed.steps)} training steps ({missed.steps[0]} to "
                f"{missed.steps[-1]}): {missed.reason}; they are in the store, and export_metrics(store, "
                f"{self._run!r}, sink) delivers them"
            )
            logger.warning(message)
            self._store.add_event(
                self._run,
                "metrics_undelivered",
                message,
                {"sink": missed.sink, "steps": list(missed.steps), "reason": missed.reason},
            )
        return lost


def export_metrics(store: Store, run_id: str, sink: MetricSink, *, directory: Path | None = None) -> int:
    """Deliver what a sink lacks of a run; doing it again changes nothing.

    Args:
        store: where the metrics are.
        run_id: of a run, also of one that is still going; those that it continues are delivered, too.
        sink: where they go.
        directory: for a sink that writes files and was not told where; None: the current one.

    Returns:
        How many training steps were delivered.

    Raises:
        StoreError: there is no such run.
        Exception: what the sink raised.
    """
    source = _Source(store, run_id, Path.cwd() if directory is None else directory)
    writer = sink.open(source.run)
    try:
        steps = [step for step in source.after(0)[0] if step.number > writer.last_step]
        for step in steps:
            writer.log(step.number, step.values, step.at)
    finally:
        writer.close(None if source.newest.state is RunState.RUNNING else source.newest.state)
    return len(steps)


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    values: dict[str, float]
    at: float
    seq: int


class _Source:
    """A run's metrics, as one run with those that it continues.

    Raises:
        StoreError: there is no such run.
    """

    def __init__(self, store: Store, run_id: str, directory: Path) -> None:
        runs: dict[str, Run] = {run.id: run for run in store.runs()}
        if run_id not in runs:
            raise StoreError(f"{store.location} has no run {run_id}")
        self.store = store
        self.newest = runs[run_id]
        self._line = [run for run in store.lineage(run_id) if run in runs]
        self.run = SinkRun(
            id=self._line[0],
            project=store.project,
            model=self.newest.model,
            config=self.newest.config,
            started_at=runs[self._line[0]].started_at,
            directory=directory,
        )

    def after(self, seq: int) -> tuple[list[_Step], int]:
        """Steps with what was logged after a number, in order; and the number that comes next."""
        found = [m for run in self._line for m in self.store.metrics(run, after=seq)]
        steps: list[_Step] = []
        for number, metrics in groupby(sorted(found, key=lambda m: (m.step, m.seq)), key=lambda m: m.step):
            own = list(metrics)
            values = {m.name: m.value for m in own}
            steps.append(_Step(number, values, max(m.created_at for m in own), max(m.seq for m in own)))
        return steps, max((m.seq for m in found), default=seq)


class _Courier:
    """Brings metrics to one sink, in a thread of its own."""

    def __init__(self, source: _Source, sink: MetricSink) -> None:
        self._source = source
        self._sink = sink
        self._writer: MetricWriter | None = None
        self._seq = 0  # what was logged up to here is delivered
        self._waiting: list[_Step] = []
        self._delivered = 0  # number of the last step that this thread delivered
        self._failure: str | None = None
        self._state: RunState | None = None
        self._closing = False
        self._change = threading.Condition()
        self._due = True  # opened, and given what it lacks, at once
        self._thread = threading.Thread(target=self._work, name=f"art-sink-{sink.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        with self._change:
            self._due = True
            self._change.notify()

    def finish(self, state: RunState | None) -> None:
        with self._change:
            self._state = state
            self._closing = self._due = True
            self._change.notify()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def undelivered(self, waited: float) -> Undelivered | None:
        """What the sink lacks, once it is over."""
        late = self._thread.is_alive()
        steps, _ = self._source.after(self._seq)
        numbers = sorted({s.number for s in (*self._waiting, *steps)} - set(range(self._known() + 1)))
        if not numbers:
            if self._failure is not None or late:
                logger.warning("sink %s was not closed: %s", self._sink.name, self._failure or "it hangs")
            return None
        reason = self._failure or f"it did not take them within {waited:g} seconds"
        return Undelivered(self._sink.name, tuple(numbers), reason)

    def _known(self) -> int:
        return max(self._delivered, 0 if self._writer is None else self._writer.last_step)

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._due)
                self._due = False
                closing = self._closing
            try:
                self._deliver()
            except Exception as failure:
                self._failed(failure)
            if closing:
                self._close()
                return

    def _close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.close(self._state)
            except Exception as failure:
                self._failed(failure)

    def _deliver(self) -> None:
        if self._writer is None:
            self._writer = self._sink.open(self._source.run)
        fresh, seq = self._source.after(self._seq)
        self._waiting += fresh
        self._seq = seq
        while self._waiting:
            step = self._waiting[0]
            if step.number > self._writer.last_step:
                self._writer.log(step.number, step.values, step.at)
                self._delivered = max(self._delivered, step.number)
            self._waiting.pop(0)
        if self._failure is not None:
            self._failure = None
            self._tell("metrics_sink_works_again", f"sink {self._sink.name} works again, and lacks nothing")

    def _failed(self, failure: Exception) -> None:
        first, self._failure = self._failure is None, f"{type(failure).__name__}: {failure}"
        if first:
            self._tell(
                "metrics_sink_failed",
                f"sink {self._sink.name} failed: {self._failure}; the run goes on, its metrics are in the "
                "store, and the sink is tried again at every training step",
            )

    def _tell(self, kind: str, message: str) -> None:
        logger.warning(message)
        try:
            self._source.store.add_event(
                self._source.newest.id, kind, message, {"sink": self._sink.name, "error": self._failure}
            )
        except StoreError as closed:  # nobody waits for this thread any more
            logger.warning("%s (not on record: %s)", message, closed)
