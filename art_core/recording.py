"""The current rollout, and recording steps into it.

Invariant: a step belongs to exactly one rollout, or it is counted as unattributed and said aloud;
a step whose recording was acknowledged is in the sink. A write that failed (a full disk) is repeated: the
beginning before the next step, steps before the end. So a rollout ends with all that it recorded in the
sink, or does not end.

A rollout lives in a context variable, so concurrent rollouts (tasks, threads started with a copied
context) never mix. Steps go to the rollout's *sink* at once: the durable store, or nothing.
"""

import asyncio
import hashlib
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from art_core.errors import UnknownTrajectoryError
from art_core.types import (
    Failure,
    RolloutStatus,
    Scenario,
    Span,
    Step,
    Trajectory,
    check_reward,
    enclosing_nodes,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Acknowledgement(Future[None]):
    """The future of a sink that gathers writes: `hurry` says that somebody waits for this one."""

    def hurry(self) -> None:
        """Keep what it stands for without waiting for more to keep with it."""
        raise NotImplementedError


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


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


class NullSink:
    """Keeps nothing: rollouts live in memory alone."""

    def begin(self, trajectory: Trajectory) -> Future[None]:  # noqa: D102 - the protocol says it
        return _done()

    def append(self, step: Step) -> Future[None]:  # noqa: D102
        return _done()

    def end(self, trajectory: Trajectory) -> Future[None]:  # noqa: D102
        return _done()

    def trace(self, rollout_id: str, span: Span) -> Future[None]:  # noqa: D102
        return _done()

    def kept(self, rollout_id: str) -> Future[Trajectory | None]:  # noqa: D102
        nothing: Future[Trajectory | None] = Future()
        nothing.set_result(None)
        return nothing


def _await(future: Future[None]) -> None:
    if isinstance(future, Acknowledgement):
        future.hurry()
    future.result()


async def _settled(future: Future[None], hurry: bool = True) -> None:
    if hurry and isinstance(future, Acknowledgement):
        future.hurry()
    if not future.done():
        # Without the shield, cancelling the waiter would cancel a write that is on its way to the disk.
        await asyncio.shield(asyncio.wrap_future(future))
    future.result()


def _failed(write: Future[None]) -> bool:
    return write.done() and write.exception() is not None


def new_id(prefix: str) -> str:
    """A unique id that says what it names (``t-0197...`` for trajectories).

    It begins with the time in milliseconds, so that indices of databases grow at their end; 80 random bits
    follow.
    """
    return f"{prefix}-{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"


@dataclass(slots=True)
class _Executions:
    """The attempts of one branch: ``before`` those of the present execution, and the ``latest``."""

    execution: float | None
    before: int = 0
    latest: int = 0


@dataclass(slots=True)
class _NodeRun:
    """The latest run of a node, the run of the graph that made it, and how many before it were retried."""

    run: object
    graph_run: object
    retries: int = 0


class Rollout:
    """A rollout while it runs: collects steps, then becomes a `Trajectory`.

    Thread-safe: parallel branches of one graph record into one rollout.

    Args:
        scenario: what is being tried.
        sink: where it is kept.
        group_id: the group that it belongs to, if any.
        metadata: kept with the trajectory.
        max_calls: the most policy calls it may make; None for no limit.
    """

    def __init__(
        self,
        scenario: Scenario | None = None,
        *,
        sink: Sink | None = None,
        group_id: str | None = None,
        rollout_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        max_calls: int | None = None,
    ) -> None:
        self.id = rollout_id or new_id("t")
        self.scenario = scenario or Scenario(id="default")
        self.group_id = group_id
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.metrics: dict[str, float] = {}
        self.components: dict[str, float] = {}
        self.step_rewards: dict[str, float] = {}
        self.node_rewards: dict[str, float] = {}
        self.max_calls = max_calls
        self.started_at = time.time()
        self._clock = time.perf_counter()
        self._sink: Sink = sink or NullSink()
        self._lock = threading.Lock()
        self._steps: list[Step] = []
        self._spans: list[Span] = []
        self._faults: Counter[str] = Counter()
        self._call_indices: Counter[tuple[str, int]] = Counter()
        self._executions: dict[str, _Executions] = {}
        self._node_runs: dict[str, _NodeRun] = {}
        self._retried = False
        self._calls = 0
        self._seeds = 0
        self._ended: Trajectory | None = None
        self._held = ExitStack()
        self._holds: dict[str, Any] = {}
        self._beginning = threading.Lock()
        self._begun = self._sink.begin(self._snapshot())
        self._writes: list[tuple[Step, Future[None]]] = []
        _open[self.id] = self

    # -- recording ---------------------------------------------------------------------------------

    def record(self, step: Step) -> None:
        """Keep a step; returns once the sink has it."""
        _await(self.submit(step))

    async def arecord(self, step: Step) -> None:
        """Keep a step without blocking the event loop; returns once the sink has it."""
        await _settled(self.submit(step))

    def submit(self, step: Step) -> Future[None]:
        """Keep a step; the future is done once the sink has it."""
        with self._lock:
            late = self._ended is not None
            if late:
                # A background task outlived its graph. The step is real, so the sink keeps it.
                self._faults["late_steps"] += 1
                logger.warning("rollout %s had ended when step %s arrived", self.id, step.id)
            self._steps.append(step)
        if _failed(self._begun):
            self._begin_again()
        write = self._sink.append(step)
        if late:
            self._say_if_lost(write, f"late step {step.id}")
        else:
            self._writes.append((step, write))
        return write

    def _begin_again(self) -> None:
        with self._beginning:
            if _failed(self._begun):  # no other thread was quicker
                self._begun = self._sink.begin(replace(self._snapshot(), steps=(), spans=()))

    def _say_if_lost(self, write: Future[None], what: str) -> None:
        def said(write: Future[None]) -> None:
            if (error := write.exception()) is not None:
                logger.error("%s of rollout %s was not kept: %s", what, self.id, error)

        write.add_done_callback(said)

    def add_span(self, span: Span) -> None:
        """Keep what a tracer saw; it goes to the sink with the rollout's end, or alone if it is late."""
        with self._lock:
            self._spans.append(span)
            late = self._ended is not None
        if late:
            self._trace(span)

    def _trace(self, span: Span) -> None:
        self._say_if_lost(self._sink.trace(self.id, span), f"late span {span.id}")

    def next_call_index(self, namespace: str, attempt: int) -> int:
        """Number the calls of one branch and attempt: 0, 1, 2, ..."""
        with self._lock:
            index = self._call_indices[namespace, attempt]
            self._call_indices[namespace, attempt] += 1
            return index

    def attempt(self, namespace: str, execution: float | None, attempt: int) -> int:
        """Number the attempts of one branch across its executions (a resume starts a new execution).

        Args:
            namespace: the branch.
            execution: what tells its executions apart (when the first attempt of this one began).
            attempt: 1 for the first attempt of this execution, counting retries.
        """
        with self._lock:
            known = self._executions.setdefault(namespace, _Executions(execution))
            if known.execution != execution:
                known.execution, known.before = execution, known.latest
            known.latest = max(known.latest, known.before + attempt)
            return known.before + attempt

    def latest_attempt(self, namespace: str) -> int:
        """The latest attempt of a branch that is known; 1 before any."""
        with self._lock:
            known = self._executions.get(namespace)
            return known.latest if known is not None else 1

    def enter_node(self, namespace: str, run: object, graph_run: object) -> None:
        """A node starts to run; a second run within one run of its graph is a retry.

        Args:
            namespace: the node's.
            run: id of this run of it.
            graph_run: id of the run of the graph that it is a node of.
        """
        with self._lock:
            known = self._node_runs.get(namespace)
            if known is None:
                self._node_runs[namespace] = _NodeRun(run, graph_run)
            elif known.run != run:  # else another handler has told already
                known.retries += known.graph_run == graph_run
                known.run, known.graph_run = run, graph_run
                self._retried = self._retried or known.retries > 0

    def retries(self, namespace: str) -> tuple[int, ...]:
        """How often each node on the path of a namespace was retried so far; empty when none was."""
        if not self._retried:
            return ()
        with self._lock:
            runs = [self._node_runs.get(node) for node in enclosing_nodes(namespace)]
        counts = tuple(run.retries if run is not None else 0 for run in runs)
        return counts if any(counts) else ()

    def next_seed(self) -> int | None:
        """A sampling seed for the next call, of 31 bits; None when the rollout has no ``seed``.

        A function of the rollout's seed and of how many were asked for before, so that a rollout whose
        calls come in the same order samples the same again.
        """
        base = self.metadata.get("seed")
        if base is None:
            return None
        with self._lock:
            number = self._seeds
            self._seeds += 1
        digest = hashlib.sha256(f"{base}/{number}".encode()).digest()
        return int.from_bytes(digest[:4]) >> 1

    def count_call(self) -> int:
        """Count a policy call that is about to be made; returns how many there are now."""
        with self._lock:
            self._calls += 1
            return self._calls

    def count_fault(self, kind: str) -> int:
        """Count something that capture could not do; returns how many of this kind there are now."""
        with self._lock:
            self._faults[kind] += 1
            return self._faults[kind]

    def hold(self, key: str, acquire: Callable[[], AbstractContextManager[T]]) -> T:
        """Enter a context once under this key, and leave it when the rollout ends; returns what it gave."""
        with self._lock:
            if key not in self._holds:
                self._holds[key] = self._held.enter_context(acquire())
            return self._holds[key]

    @property
    def steps(self) -> tuple[Step, ...]:
        """What has been recorded so far, in the order in which the calls started."""
        with self._lock:
            return tuple(sorted(self._steps, key=lambda s: s.started_at))

    @property
    def ended(self) -> bool:
        """Whether `finish` or `fail` was called."""
        return self._ended is not None

    # -- ending ------------------------------------------------------------------------------------

    def finish(self, reward: float | None = None) -> Trajectory:
        """End it; the reward may also come later, by `Trajectory.with_reward`.

        Raises:
            RewardError: the reward is not a finite number (the rollout then goes on).
            UnknownTrajectoryError: it has ended already.
        """
        if reward is not None:
            reward = check_reward(reward, f"trajectory {self.id}")
        return self._end(RolloutStatus.FINISHED, reward, None)

    def fail(self, failure: Failure) -> Trajectory:
        """End it without a reward; its steps are kept."""
        return self._end(RolloutStatus.FAILED, None, failure)

    async def afinish(self, reward: float | None = None, *, hurry: bool = True) -> Trajectory:
        """`finish`, without blocking the event loop while the sink works.

        Args:
            reward: what it was worth, if that is known.
            hurry: False lets the sink wait a moment for others to be kept together with it.
        """
        if reward is not None:
            reward = check_reward(reward, f"trajectory {self.id}")
        return await self._aend(RolloutStatus.FINISHED, reward, None, hurry)

    async def afail(self, failure: Failure) -> Trajectory:
        """`fail`, without blocking the event loop while the sink works."""
        return await self._aend(RolloutStatus.FAILED, None, failure)

    def snapshot(self) -> Trajectory:
        """The trajectory as it is now."""
        return self._ended or self._snapshot()

    def _end(self, status: RolloutStatus, reward: float | None, failure: Failure | None) -> Trajectory:
        ending = self._ending(status, reward, failure)
        try:
            while True:
                write = next(ending)
                with suppress(Exception):  # `_ending` looks at the outcome itself
                    _await(write)
        except StopIteration as over:
            return over.value

    async def _aend(
        self, status: RolloutStatus, reward: float | None, failure: Failure | None, hurry: bool = True
    ) -> Trajectory:
        ending = self._ending(status, reward, failure)
        cancelled: asyncio.CancelledError | None = None
        try:
            while True:
                write = next(ending)
                while not write.done():
                    try:
                        await _settled(write, hurry)
                    except asyncio.CancelledError as error:  # the end is on its way: see it through
                        cancelled = error
                    except Exception:  # `_ending` looks at the outcome itself
                        break
        except StopIteration as over:
            if cancelled is not None:
                raise cancelled from None
            return over.value

    def _ending(
        self, status: RolloutStatus, reward: float | None, failure: Failure | None
    ) -> Generator[Future[None], None, Trajectory]:
        """Ends the rollout; yields each write that must be waited for, whatever its outcome."""
        with self._lock:
            if self._ended is not None:
                raise UnknownTrajectoryError(
                    f"trajectory {self.id} has ended already ({self._ended.status}); start a new one"
                )
        yield from self._repeat_writes()
        ended = self._snapshot(status, reward, failure)
        end = self._sink.end(ended)  # before waiting for the beginning: they share a transaction
        for write in (self._begun, end):
            yield write
            write.result()
        for step, write in self._writes:
            yield write
            if _failed(
                write
            ):  # it cannot be written at all: whatever ails the sink would have hit the end, too
                logger.error("step %s of rollout %s was not kept: %s", step.id, self.id, write.exception())
        self._settle(ended)
        return ended

    def _repeat_writes(self) -> Generator[Future[None]]:
        if not _failed(self._begun) and not any(_failed(write) for _, write in self._writes):
            return
        if _failed(self._begun):
            self._begin_again()
        for i, (step, write) in enumerate(self._writes):  # in place: another thread may be adding one
            if _failed(write):
                self._writes[i] = step, self._sink.append(step)
        for _, write in self._writes:
            yield write
        unkept = sum(_failed(write) for _, write in self._writes)
        with self._lock:
            self._faults.pop("lost_steps", None)  # whoever counted them did not know of this attempt
            if unkept:
                self._faults["lost_steps"] = unkept

    def _settle(self, ended: Trajectory) -> None:
        with self._lock:
            self._ended = ended
            late = self._spans[len(ended.spans) :]  # came while the end was being written
        for span in late:
            self._trace(span)
        _open.pop(self.id, None)
        self._held.close()

    def _snapshot(
        self,
        status: RolloutStatus = RolloutStatus.RUNNING,
        reward: float | None = None,
        failure: Failure | None = None,
    ) -> Trajectory:
        with self._lock:
            return Trajectory(
                id=self.id,
                scenario=self.scenario,
                steps=tuple(sorted(self._steps, key=lambda s: s.started_at)),
                group_id=self.group_id,
                status=status,
                reward=reward,
                components=dict(self.components),
                step_rewards=dict(self.step_rewards),
                node_rewards=dict(self.node_rewards),
                metrics=dict(self.metrics),
                metadata=dict(self.metadata),
                faults=dict(self._faults),
                failure=failure,
                started_at=self.started_at,
                duration=None if status is RolloutStatus.RUNNING else time.perf_counter() - self._clock,
                spans=tuple(sorted(self._spans, key=lambda s: s.started_at)),
            )


_current: ContextVar[Rollout | None] = ContextVar("art_rollout")


_UNSAID = object()

_open: "weakref.WeakValueDictionary[str, Rollout]" = weakref.WeakValueDictionary()


def open_rollouts() -> tuple[Rollout, ...]:
    """The rollouts of this process that have not ended."""
    return tuple(_open.values())


def open_rollout(rollout_id: str) -> Rollout | None:
    """The rollout of this process with this id, if it has not ended."""
    return _open.get(rollout_id)


def current_rollout() -> Rollout | None:
    """The rollout that calls made here belong to."""
    rollout = _current.get(None)
    return None if rollout is None or rollout.ended else rollout


def context_is_known() -> bool:
    """Whether this context says which rollout it belongs to, be it none (a judge's has none).

    False where nothing was ever said: outside of rollouts, and in a thread that was started without a
    copy of the context.
    """
    return _current.get(_UNSAID) is not _UNSAID


def set_current_rollout(rollout: Rollout | None) -> None:
    """Make a rollout the current one of this context (of this task, of this thread)."""
    _current.set(rollout)


@contextmanager
def recording(rollout: Rollout) -> Generator[Rollout]:
    """Make a rollout the current one inside the block."""
    token = _current.set(rollout)
    try:
        yield rollout
    finally:
        _current.reset(token)
