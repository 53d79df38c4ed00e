"""Rollouts in many processes, because one Python process runs only so many agents a second.

Invariant: every planned rollout comes to an end. If its process dies, it has failed, its siblings in other
processes go on, and what it recorded before is on the trajectory, read back from the store.

Data flow: `Workers` starts processes by *spawn*. For each batch of rollouts they are sent the `Job`: how to
build the agent, and the terms with a sink that opens the store again on the other side. Batches of the same
job at the same time, as of groups that are gathered one by one, share it: its agent is built once in each
process. A `Plan` goes to the process that is least busy; that process runs it as `InProcess` would, records
its steps itself, and sends the ended trajectory back (`worker_process`).
"""

import asyncio
import itertools
import logging
import pickle
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Self

from art_core.errors import ConfigError, StoreError, UnknownTrajectoryError
from art_core.recording import Sink
from art_core.rollouts import Plan, Runner
from art_core.types import Failure, RolloutStatus, Trajectory
from art_core.worker_handle import WorkerDiedError, WorkerHandle
from art_core.worker_process import Forget
from art_core.worker_process import Job as Job

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""Seconds until a process must have built its agent; importing a large framework takes its time."""


class Workers:
    """Worker processes. Use as a context manager, ``with`` or ``async with``.

    Starting processes and importing a framework in each takes seconds, so keep them between batches:
    ``with Workers(8) as workers: ... agather(..., workers=workers)``. One that has died is replaced when
    the next batch begins.

    Args:
        count: how many processes.

    Raises:
        ConfigError: ``count`` is below 1.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ConfigError(f"workers={count}: expected at least 1")
        self._count = count
        self._workers: list[WorkerHandle] = []
        self._open = False
        self._lock = threading.Lock()
        self._beginning = threading.Lock()
        self._numbers = itertools.count()
        self._jobs: dict[bytes, _Begun] = {}

    def __enter__(self) -> Self:
        self._open = True
        try:
            self._fill()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        entering = asyncio.ensure_future(asyncio.to_thread(self.__enter__))
        try:
            return await asyncio.shield(entering)
        except asyncio.CancelledError:
            # Its thread goes on, and starts processes that nobody would end.
            await asyncio.wait({entering})
            await asyncio.to_thread(self.close)
            raise

    async def __aexit__(self, *_exception: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the processes, by force if need be."""
        with self._lock:
            self._open = False
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.ask_to_stop()
        for worker in workers:
            worker.stop()

    @asynccontextmanager
    async def doing(self, job: Job) -> AsyncGenerator[Runner]:
        """A runner of one job's rollouts on these processes; several jobs may be done at a time.

        Raises:
            ConfigError: the processes are not started, the agent cannot be built, or the reward function
                or sink can't be sent to a process.
        """
        async with self._doing(_checked(job), job.terms.sink) as runner:
            yield runner

    @asynccontextmanager
    async def _doing(self, pickled: bytes, sink: Sink | None) -> AsyncGenerator[Runner]:
        workers = await asyncio.to_thread(self._fill)
        job = self._begin(pickled, workers)
        try:
            built = asyncio.gather(*(asyncio.wrap_future(job.built[worker]) for worker in workers))
            try:
                await asyncio.wait_for(built, START_TIMEOUT)
            except TimeoutError:
                raise ConfigError(
                    f"the workers have not built their agents within {START_TIMEOUT:g} s"
                ) from None
            yield _JobRunner(workers, job.number, sink)
        finally:
            self._end(pickled, job)

    def _begin(self, pickled: bytes, workers: Sequence[WorkerHandle]) -> "_Begun":
        """A job, begun in these processes; in those where it is under way already it is not begun again."""
        with self._beginning:
            job = self._jobs.setdefault(pickled, _Begun(next(self._numbers)))
            job.users += 1
            for worker in workers:
                built = job.built.get(worker)
                if built is None or (built.done() and built.exception() is not None):
                    job.built[worker] = worker.begin(job.number, pickled)
            return job

    def _end(self, pickled: bytes, job: "_Begun") -> None:
        """One who does a job is done; the last one ends it."""
        with self._beginning:
            job.users -= 1
            if job.users:
                return
            del self._jobs[pickled]
        for worker in job.built:
            worker.send(Forget(job.number))

    def _fill(self) -> Sequence[WorkerHandle]:
        """All the processes, those that have died replaced."""
        with self._lock:
            if not self._open:
                raise ConfigError(
                    "these workers are not running: use them inside `with Workers(...) as workers`"
                )
            alive = [worker for worker in self._workers if worker.alive]
            for worker in self._workers:
                if not worker.alive:
                    worker.stop()
            self._workers = alive
            free = [n for n in range(self._count) if n not in {worker.number for worker in alive}]
            for number in free:
                self._workers.append(WorkerHandle.start(number))
            return tuple(self._workers)


@asynccontextmanager
async def runner_of(workers: "int | Workers", job: Job) -> AsyncGenerator[Runner]:
    """A runner of a job: on so many processes of its own, or on those that the user keeps.

    Raises:
        ConfigError: as `Workers` and `Workers.doing` say; what cannot be sent is refused before any process
            is started.
    """
    pool = Workers(workers) if isinstance(workers, int) else workers
    pickled = _checked(job)
    if pool is workers:
        async with pool._doing(pickled, job.terms.sink) as runner:  # pyright: ignore[reportPrivateUsage]
            yield runner
    else:
        async with pool, pool._doing(pickled, job.terms.sink) as runner:  # pyright: ignore[reportPrivateUsage]
            yield runner


@dataclass(eq=False, slots=True)
class _Begun:
    """A job under way.

    Attributes:
        number: by which the processes know it.
        built: done when a process has built its agent, or cannot.
        users: how many are doing it.
    """

    number: int
    built: dict[WorkerHandle, "Future[None]"] = field(default_factory=dict[WorkerHandle, "Future[None]"])
    users: int = 0


class _JobRunner:
    """Runs one job's rollouts (see `art_core.rollouts.Runner`)."""

    def __init__(self, workers: Sequence[WorkerHandle], job: int, sink: Sink | None) -> None:
        self._workers = workers
        self._job = job
        self._sink = sink

    async def run(self, plan: Plan, finishing: Callable[[], bool] | None = None) -> Trajectory:
        """Run one rollout in the process that is least busy; ``finishing`` is not called.

        Raises:
            StoreError: its process cannot record it.
        """
        alive = [worker for worker in self._workers if worker.alive]
        if not alive:
            return await self._lost(plan, "all worker processes have died")
        worker = min(alive, key=lambda w: len(w.running))
        try:
            return await worker.run(self._job, plan)
        except WorkerDiedError as died:
            return await self._lost(plan, str(died))

    async def _lost(self, plan: Plan, reason: str) -> Trajectory:
        """End a rollout whose process died, here and in the store."""
        kept = "was kept nowhere, because it has no store" if self._sink is None else "was kept"
        failure = Failure("worker", f"{reason}; what the rollout had recorded {kept}")
        return await asyncio.to_thread(_end_orphan, plan, self._sink, failure)


def _checked(job: Job) -> bytes:
    """A job as it is sent; what cannot be sent, or cannot work, is refused."""
    job.terms.check()
    return _pickled(job)


def _pickled(job: Job) -> bytes:
    for name, part in (("reward function", job.terms.reward), ("sink", job.terms.sink)):
        check_sendable(
            name, part, "A reward function must be defined at a module's top level, a sink be a store's"
        )
    return pickle.dumps(job)


def check_sendable(name: str, part: object, way_out: str) -> None:
    """Whether worker processes can be given something.

    Args:
        name: what the user calls it.
        part: that is sent, pickled.
        way_out: what can be done if it cannot be.

    Raises:
        ConfigError: it cannot be.
    """
    try:
        pickle.dumps(part)
    except Exception as unpicklable:  # pickle raises whatever an object's __reduce__ raises
        raise ConfigError(
            f"with workers, the {name} is sent to other processes, and this one can't be: {unpicklable}. "
            f"{way_out}"
        ) from unpicklable


def _end_orphan(plan: Plan, sink: Sink | None, failure: Failure) -> Trajectory:
    ended = plan.begin(None).fail(failure)
    if sink is None:
        return ended
    try:
        sink.end(ended).result()
    except UnknownTrajectoryError:  # the process died before the rollout's beginning was written
        return plan.begin(sink).fail(failure)
    except StoreError as refused:
        # It may have ended there in the moment before its process died.
        logger.warning("rollout %s could not be marked as failed: %s", plan.rollout_id, refused)
    kept = sink.kept(plan.rollout_id).result()
    if kept is None:
        return ended
    if kept.status is RolloutStatus.RUNNING:  # the failure itself could not be written
        return replace(ended, steps=kept.steps, started_at=kept.started_at)
    return kept
