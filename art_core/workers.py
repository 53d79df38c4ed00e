"""Rollouts in many processes, because one Python process runs only so many agents a second.

Invariant: every planned rollout comes to an end. If its process dies, it has failed, its siblings in other
processes go on, and what it recorded before is on the trajectory, read back from the store.

Data flow: `Workers` starts processes by *spawn*. For each batch of rollouts they are sent the `Job`: how to
build the agent, and the terms with a sink that opens the store again on the other side. A `Plan` goes to the
process that is least busy; that process runs it as `InProcess` would, records its steps itself, and sends the
ended trajectory back (`worker_process`).
"""

import asyncio
import itertools
import logging
import multiprocessing
import pickle
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Self, TypeVar

from art_core.errors import ConfigError, StoreError, UnknownTrajectoryError
from art_core.recording import Sink
from art_core.rollouts import Plan, Runner
from art_core.types import Failure, RolloutStatus, Trajectory
from art_core.worker_process import Begin, Broken, Cancel, Ended, Forget, Ready, Refused, Run, work
from art_core.worker_process import Job as Job

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_TIMEOUT = 120.0
"""Seconds until a process must have built its agent; importing a large framework takes its time."""

STOP_TIMEOUT = 10.0
"""Seconds that a process gets to end by itself."""


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
        self._workers: list[_Worker] = []
        self._open = False
        self._lock = threading.Lock()
        self._jobs = itertools.count()

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
        return await asyncio.to_thread(self.__enter__)

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
        number = next(self._jobs)
        workers = await asyncio.to_thread(self._fill)
        try:
            built = asyncio.gather(*(asyncio.wrap_future(w.begin(number, pickled)) for w in workers))
            try:
                await asyncio.wait_for(built, START_TIMEOUT)
            except TimeoutError:
                raise ConfigError(
                    f"the workers have not built their agents within {START_TIMEOUT:g} s"
                ) from None
            yield _JobRunner(workers, number, sink)
        finally:
            for worker in workers:
                worker.send(Forget(number))

    def _fill(self) -> "Sequence[_Worker]":
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
                self._workers.append(_Worker.start(number))
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


class _JobRunner:
    """Runs one job's rollouts (see `art_core.rollouts.Runner`)."""

    def __init__(self, workers: "Sequence[_Worker]", job: int, sink: Sink | None) -> None:
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
        except _WorkerDiedError as died:
            return await self._lost(plan, str(died))

    async def _lost(self, plan: Plan, reason: str) -> Trajectory:
        """End a rollout whose process died, here and in the store."""
        kept = "was kept nowhere, because it has no store" if self._sink is None else "was kept"
        failure = Failure("worker", f"{reason}; what the rollout had recorded {kept}")
        return await asyncio.to_thread(_end_orphan, plan, self._sink, failure)


class _WorkerDiedError(Exception):
    pass


@dataclass(eq=False)
class _Worker:
    """One process, seen from the parent. Thread-safe: the loops of its callers may come and go."""

    number: int
    process: SpawnProcess
    pipe: "Connection[Any, Any]"
    alive: bool = True
    running: dict[str, "Future[Trajectory]"] = field(default_factory=dict[str, "Future[Trajectory]"])
    building: dict[int, "Future[None]"] = field(default_factory=dict[int, "Future[None]"])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sending: threading.Lock = field(default_factory=threading.Lock)
    _gone: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def start(cls, number: int) -> "_Worker":
        """Start a process."""
        spawn = multiprocessing.get_context("spawn")
        pipe, theirs = spawn.Pipe()
        process = spawn.Process(target=work, args=(theirs,), name=f"art-worker-{number}", daemon=True)
        process.start()
        theirs.close()  # so that the pipe ends when the process does
        worker = cls(number, process, pipe)
        threading.Thread(target=worker._listen, name=f"art-worker-{number}-pipe", daemon=True).start()
        return worker

    def begin(self, job: int, pickled: bytes) -> "Future[None]":
        """Have it build the agent of a job; the future raises `ConfigError` if it cannot."""
        built: Future[None] = _uncancellable()
        with self._lock:
            if self.alive:
                self.building[job] = built
            else:
                built.set_exception(ConfigError(f"worker process {self.number} has died"))
        self.send(Begin(job, pickled))
        return built

    async def run(self, job: int, plan: Plan) -> Trajectory:
        """Run one rollout there."""
        ended: Future[Trajectory] = _uncancellable()
        with self._lock:
            if not self.alive:
                raise _WorkerDiedError(f"worker process {self.number} died")
            self.running[plan.rollout_id] = ended
        waiting = asyncio.wrap_future(ended)
        try:
            self.send(Run(job, plan))
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self.send(Cancel(plan.rollout_id))
            # It ends as cancelled over there; a process that does not even do that is killed in `stop`.
            await asyncio.wait({waiting}, timeout=STOP_TIMEOUT)
            raise
        finally:
            with self._lock:
                self.running.pop(plan.rollout_id, None)
            if waiting.done() and not waiting.cancelled():
                waiting.exception()  # retrieved, also when nobody waits any more
            waiting.cancel()

    def ask_to_stop(self) -> None:
        """Let it end by itself."""
        self.send(None)

    def stop(self) -> None:
        """Wait for its end, or force it."""
        if not self._gone.wait(STOP_TIMEOUT):
            logger.warning("worker %d did not end by itself and is killed", self.number)
            self.process.kill()
            self._gone.wait()
        self.process.join()
        self.process.close()
        self.pipe.close()

    def send(self, message: object) -> None:
        """Send it a message; one that is gone gets none, and the listening thread says so."""
        pickled = pickle.dumps(message)
        try:
            with self._sending:
                self.pipe.send_bytes(pickled)
        except OSError:
            logger.debug("worker %d is gone", self.number)

    def _listen(self) -> None:
        while True:
            try:
                message = self.pipe.recv()
            except (EOFError, OSError):
                break
            self._receive(message)
        self._die()

    def _receive(self, message: object) -> None:
        match message:
            case Ready(job):
                _settle(self._take(self.building, job), None)
            case Broken(job, reason):
                broken = ConfigError(f"worker {self.number} cannot begin: {reason}")
                _settle(self._take(self.building, job), broken)
            case Ended(trajectory):
                _settle(self._take(self.running, trajectory.id), trajectory)
            case Refused(rollout_id, error):
                _settle(self._take(self.running, rollout_id), error)
            case _:
                raise AssertionError(f"worker {self.number} sent {message!r}")

    def _take(self, waiting: "dict[Any, Future[T]]", key: object) -> "Future[T] | None":
        with self._lock:
            return waiting.pop(key, None)

    def _die(self) -> None:
        self.process.join(1)  # the pipe has ended, so the process has, or is about to
        code = self.process.exitcode
        how = (
            f"killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"exit code {code}"
        )
        died = f"worker process {self.number} died ({how})"
        with self._lock:
            self.alive = False
            building, lost = list(self.building.values()), list(self.running.values())
        lost = [ended for ended in lost if not ended.done()]
        if lost:
            logger.error("%s; %d rollouts that it was running have failed", died, len(lost))
        for built in building:
            _settle(built, ConfigError(f"{died} before it had built its agent"))
        for ended in lost:
            _settle(ended, _WorkerDiedError(died))
        self._gone.set()


def _uncancellable() -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _settle(future: "Future[Any] | None", outcome: object) -> None:
    if future is None or future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _checked(job: Job) -> bytes:
    """A job as it is sent; what cannot be sent, or cannot work, is refused."""
    job.terms.check()
    return _pickled(job)


def _pickled(job: Job) -> bytes:
    for name, part in (("reward function", job.terms.reward), ("sink", job.terms.sink)):
        try:
            pickle.dumps(part)
        except Exception as unpicklable:  # pickle raises whatever an object's __reduce__ raises
            raise ConfigError(
                f"with workers, the {name} is sent to other processes, and this one can't be: {unpicklable}. "
                "A reward function must be defined at a module's top level, a sink be a store's"
            ) from unpicklable
    return pickle.dumps(job)


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
