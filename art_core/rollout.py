"""A rollout while it runs.

Steps go to the rollout's *sink* at once: the durable store, or nothing.
"""

import asyncio
import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Self, TypeVar

from art_core.branches import Branches
from art_core.errors import UnknownTrajectoryError
from art_core.ids import new_id
from art_core.open_rollouts import closed, opened
from art_core.rollout_writes import RolloutWrites
from art_core.sinks import NullSink, Sink, settled, wait_for
from art_core.types import (
    Failure,
    RolloutStatus,
    Scenario,
    Span,
    Step,
    Trajectory,
    check_reward,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Rollout:
    """A rollout while it runs: collects steps, then becomes a `Trajectory`.

    Thread-safe: parallel branches of one graph record into one rollout.

    Args:
        scenario: what is being tried.
        sink: where it is kept.
        group_id: the group that it belongs to, if any.
        metadata: kept with the trajectory.
        max_calls: the most policy calls it may make; None for no limit.
        resumed: what `resume` goes on with; nothing else is then kept as its beginning.
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
        resumed: Trajectory | None = None,
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
        self.branches = Branches()
        self.started_at = time.time()
        self._clock = time.perf_counter()
        self._lock = threading.Lock()
        self._steps: list[Step] = []
        self._spans: list[Span] = []
        self._faults: Counter[str] = Counter()
        self._calls = 0
        self._seeds = 0
        self._ended: Trajectory | None = None
        self._held = ExitStack()
        self._holds: dict[str, Any] = {}
        if resumed is not None:
            self._take_up(resumed)
        self._writes = RolloutWrites(self.id, sink or NullSink(), self._snapshot, resumed)
        opened(self)

    def _take_up(self, known: Trajectory) -> None:
        self.metrics.update(known.metrics)
        self.components.update(known.components)
        self.step_rewards.update(known.step_rewards)
        self.node_rewards.update(known.node_rewards)
        self.branches = Branches.after(step.identity for step in known.steps)
        self.started_at = known.started_at
        self._clock -= max(0.0, time.time() - known.started_at)
        self._steps.extend(known.steps)
        self._spans.extend(known.spans)
        self._faults.update(known.faults)
        self._calls = self._seeds = len({step.call_id or step.id for step in known.steps if step.policy})

    @classmethod
    def resume(cls, paused: Trajectory, *, sink: Sink | None = None, max_calls: int | None = None) -> Self:
        """Go on with a rollout that another process has paused, or left when it died.

        So an agent that waits for a person can be answered hours later. What LangGraph runs again then
        counts as a later attempt of what it ran before. One process may go on at a time; that is not checked.

        Args:
            paused: as far as it has come, as in ``store.trajectory(id)``.
            sink: where it is kept, with what is there of it.
            max_calls: the most policy calls, those before included.

        Raises:
            UnknownTrajectoryError: it has ended.
        """
        if paused.status is not RolloutStatus.RUNNING:
            raise UnknownTrajectoryError(
                f"trajectory {paused.id} has ended ({paused.status}), and cannot be resumed; start a new one"
            )
        return cls(
            paused.scenario,
            sink=sink,
            group_id=paused.group_id,
            rollout_id=paused.id,
            metadata=paused.metadata,
            max_calls=max_calls,
            resumed=paused,
        )

    # -- recording ---------------------------------------------------------------------------------

    def record(self, step: Step) -> None:
        """Keep a step; returns once the sink has it."""
        wait_for(self.submit(step))

    async def arecord(self, step: Step) -> None:
        """Keep a step without blocking the event loop; returns once the sink has it."""
        await settled(self.submit(step))

    def submit(self, step: Step) -> Future[None]:
        """Keep a step; the future is done once the sink has it."""
        with self._lock:
            late = self._ended is not None
            if late:
                # A background task outlived its graph. The step is real, so the sink keeps it.
                self._faults["late_steps"] += 1
                logger.warning("rollout %s had ended when step %s arrived", self.id, step.id)
            self._steps.append(step)
        return self._writes.append(step, late=late)

    def add_span(self, span: Span) -> None:
        """Keep what a tracer saw; it goes to the sink with the rollout's end, or alone if it is late."""
        with self._lock:
            self._spans.append(span)
            late = self._ended is not None
        if late:
            self._writes.trace(span)

    def note_graph(self, shape: Mapping[str, Any]) -> None:
        """Keep the shape of the graph that runs, for those who look (see `art_core.sinks.GraphSink`)."""
        self._writes.note_graph(shape)

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
        """Whether `finish`, `fail` or `pause` was called."""
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

    def pause(self) -> Trajectory:
        """Let go of it without an end: its steps and spans are in the sink, and `resume` goes on from there.

        Metrics, faults and what was added to its metadata are kept with an end alone; pass them on by hand.

        Raises:
            StoreError: the sink cannot keep it; the rollout then goes on here.
            UnknownTrajectoryError: it has ended already.
        """
        self._check_open()
        for write in self._repeat_writes():
            with suppress(Exception):  # looked at below
                wait_for(write)
        self._writes.flush(self._snapshot().spans)
        self._settle(paused := self._snapshot())
        return paused

    async def apause(self) -> Trajectory:
        """`pause`, without blocking the event loop."""
        return await asyncio.to_thread(self.pause)

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
                    wait_for(write)
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
                        await settled(write, hurry)
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
        self._check_open()
        yield from self._repeat_writes()
        ended = self._snapshot(status, reward, failure)
        yield from self._writes.end(ended)
        self._settle(ended)
        return ended

    def _check_open(self) -> None:
        with self._lock:
            if self._ended is None:
                return
            status = self._ended.status
            paused = status is RolloutStatus.RUNNING
            how = "was paused; Rollout.resume goes on" if paused else f"has ended already ({status})"
        raise UnknownTrajectoryError(f"trajectory {self.id} {how}; or start a new one")

    def _repeat_writes(self) -> Generator[Future[None]]:
        unkept = yield from self._writes.repeat()
        if unkept is None:
            return
        with self._lock:
            self._faults.pop("lost_steps", None)  # whoever counted them did not know of this attempt
            if unkept:
                self._faults["lost_steps"] = unkept

    def _settle(self, ended: Trajectory) -> None:
        with self._lock:
            self._ended = ended
            late = self._spans[len(ended.spans) :]  # came while the end was being written
        for span in late:
            self._writes.trace(span)
        closed(self)
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
