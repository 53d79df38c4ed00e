"""Rollouts in many processes, because one Python process runs only so many agents a second.

Invariant: every planned rollout comes to an end. If its process dies, it has failed, its siblings in other
processes go on, and what it recorded before is on the trajectory, read back from the store.

Data flow: the parent starts ``count`` processes by *spawn* and sends each the `Job`: how to build the
agent, and the terms with a sink that opens the store again on the other side. It sends a `Plan` to
the process that is least busy; that process runs it as `InProcess` would, records its steps itself, and
sends the ended trajectory back.
"""

import asyncio
import logging
import multiprocessing
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Self

from art_core.errors import ArtError, ConfigError, RolloutFailedError, StoreError, UnknownTrajectoryError
from art_core.recording import Sink
from art_core.rollouts import Agent, InProcess, Plan, Terms
from art_core.types import Failure, RolloutStatus, Trajectory

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""Seconds until a process must have built its agent; importing a large framework takes its time."""

STOP_TIMEOUT = 10.0
"""Seconds that a process gets to end by itself."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker process needs to begin; everything in it can be pickled.

    Attributes:
        build: a function of some module's top level; makes the agent.
        arguments: its arguments.
        terms: of all rollouts; reward function and sink are sent along.
    """

    build: Callable[..., Agent]
    arguments: tuple[Any, ...]
    terms: Terms


# What goes over the pipe. To the worker: the pickled Job first, then Run and Cancel, None at the end. Back:
# Ready or Broken first, then Ended and Refused.


@dataclass(frozen=True, slots=True)
class _Run:
    plan: Plan


@dataclass(frozen=True, slots=True)
class _Cancel:
    rollout_id: str


@dataclass(frozen=True, slots=True)
class _Ready:
    pass


@dataclass(frozen=True, slots=True)
class _Broken:
    reason: str


@dataclass(frozen=True, slots=True)
class _Ended:
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class _Refused:
    """The rollout could not even be recorded; the error is the parent's to raise."""

    rollout_id: str
    error: Exception


class Workers:
    """Worker processes as a `art_core.rollouts.Runner`. Use as an async context manager.

    Args:
        count: how many processes.
        job: what they do.

    Raises:
        ConfigError: ``count`` is below 1, or the reward function or sink can't be sent to a process.
    """

    def __init__(self, count: int, job: Job) -> None:
        if count < 1:
            raise ConfigError(f"workers={count}: expected at least 1")
        job.terms.check()
        self._sink = job.terms.sink
        self._pickled_job = _pickled(job)
        self._workers = [_Worker(number) for number in range(count)]

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(worker.start(self._pickled_job) for worker in self._workers))
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._stop()

    async def run(self, plan: Plan) -> Trajectory:
        """Run one rollout in the process that is least busy.

        Raises:
            StoreError: its process cannot record it.
        """
        alive = [worker for worker in self._workers if worker.alive]
        if not alive:
            return await self._lost(plan, "all worker processes have died")
        worker = min(alive, key=lambda w: len(w.running))
        try:
            return await worker.run(plan)
        except _WorkerDiedError as died:
            return await self._lost(plan, str(died))

    async def _lost(self, plan: Plan, reason: str) -> Trajectory:
        """End a rollout whose process died, here and in the store."""
        kept = "was kept nowhere, because it has no store" if self._sink is None else "was kept"
        failure = Failure("worker", f"{reason}; what the rollout had recorded {kept}")
        return await asyncio.to_thread(_end_orphan, plan, self._sink, failure)

    async def _stop(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self._workers))


class _WorkerDiedError(Exception):
    pass


@dataclass(eq=False)
class _Worker:
    """One process, seen from the parent. Everything but `_listen` runs on the parent's event loop."""

    number: int
    alive: bool = False
    running: dict[str, "asyncio.Future[Trajectory]"] = field(
        default_factory=dict[str, "asyncio.Future[Trajectory]"]
    )
    _process: SpawnProcess | None = None
    _pipe: "Connection[Any, Any] | None" = None
    _gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, pickled_job: bytes) -> None:
        """Start the process; returns once it has built its agent.

        Raises:
            ConfigError: it could not.
        """
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(
            target=_work, args=(theirs,), name=f"art-worker-{self.number}", daemon=True
        )
        await asyncio.to_thread(self._process.start)
        theirs.close()  # so that the pipe ends when the process does
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        threading.Thread(
            target=self._listen,
            args=(self._pipe, asyncio.get_running_loop(), ready),
            name=f"art-worker-{self.number}-pipe",
            daemon=True,
        ).start()
        self._send_raw(pickled_job)
        try:
            await asyncio.wait_for(ready, START_TIMEOUT)
        except TimeoutError:
            raise ConfigError(
                f"worker {self.number} has not built its agent within {START_TIMEOUT:g} s"
            ) from None
        self.alive = True

    async def run(self, plan: Plan) -> Trajectory:
        """Run one rollout there."""
        ended: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()
        self.running[plan.rollout_id] = ended
        try:
            self._send(_Run(plan))
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._send(_Cancel(plan.rollout_id))
            # It ends as cancelled over there; a process that does not even do that is killed in `stop`.
            await asyncio.wait({ended}, timeout=STOP_TIMEOUT)
            raise
        finally:
            self.running.pop(plan.rollout_id, None)
            if ended.done() and not ended.cancelled():
                ended.exception()  # retrieved, also when nobody waits any more

    async def stop(self) -> None:
        """End the process, by force if need be."""
        if self._process is None or self._pipe is None or self._process.pid is None:
            return
        self._send(None)
        try:
            await asyncio.wait_for(self._gone.wait(), STOP_TIMEOUT)
        except TimeoutError:
            logger.warning("worker %d did not end by itself and is killed", self.number)
            self._process.kill()
            await self._gone.wait()
        await asyncio.to_thread(self._process.join)
        self._process.close()
        self._process = None
        self._pipe.close()

    def _send(self, message: object) -> None:
        self._send_raw(pickle.dumps(message))

    def _send_raw(self, message: bytes) -> None:
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(message)
        except OSError:
            logger.debug("worker %d is gone; the listening thread says so", self.number)

    def _listen(
        self, pipe: "Connection[Any, Any]", loop: asyncio.AbstractEventLoop, ready: "asyncio.Future[None]"
    ) -> None:
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                break
            loop.call_soon_threadsafe(self._receive, message, ready)
        loop.call_soon_threadsafe(self._die, ready)

    def _receive(self, message: object, ready: "asyncio.Future[None]") -> None:
        match message:
            case _Ready():
                if not ready.done():
                    ready.set_result(None)
            case _Broken(reason):
                if not ready.done():
                    ready.set_exception(ConfigError(f"worker {self.number} cannot begin: {reason}"))
            case _Ended(trajectory):
                ended = self.running.get(trajectory.id)
                if ended is not None and not ended.done():
                    ended.set_result(trajectory)
            case _Refused(rollout_id, error):
                ended = self.running.get(rollout_id)
                if ended is not None and not ended.done():
                    ended.set_exception(error)
            case _:
                raise AssertionError(f"worker {self.number} sent {message!r}")

    def _die(self, ready: "asyncio.Future[None]") -> None:
        self.alive = False
        process = self._process
        if process is not None:
            process.join(1)  # the pipe has ended, so the process has, or is about to
        code = process.exitcode if process is not None else None
        how = (
            f"killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"exit code {code}"
        )
        died = f"worker process {self.number} died ({how})"
        if not ready.done():
            ready.set_exception(ConfigError(f"{died} before it had built its agent"))
        lost = [ended for ended in self.running.values() if not ended.done()]
        if lost:
            logger.error("%s; %d rollouts that it was running have failed", died, len(lost))
        for ended in lost:
            ended.set_exception(_WorkerDiedError(died))
        self._gone.set()


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


# -- in the worker process ----------------------------------------------------------------------------


def _work(pipe: "Connection[Any, Any]") -> None:
    # An interrupt from the terminal reaches every process; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        job: Job = pickle.loads(pipe.recv_bytes())
        runner = InProcess(job.build(*job.arguments), job.terms)
    except EOFError:
        return
    except BaseException as broken:
        last = traceback.format_exception_only(broken)[-1].strip()
        pipe.send(_Broken(last))
        return
    pipe.send(_Ready())
    asyncio.run(_serve(pipe, runner))


async def _serve(pipe: "Connection[Any, Any]", runner: InProcess) -> None:
    loop = asyncio.get_running_loop()
    running: dict[str, asyncio.Task[None]] = {}
    over = asyncio.Event()

    async def run(plan: Plan) -> None:
        try:
            answer = _Ended(await runner.run(plan))
        except asyncio.CancelledError:
            answer = _Refused(plan.rollout_id, RolloutFailedError(f"rollout {plan.rollout_id} was cancelled"))
        except ArtError as error:
            answer = _Refused(plan.rollout_id, error)
        except Exception as error:  # others' exceptions may not survive the pipe
            answer = _Refused(plan.rollout_id, RolloutFailedError(f"{type(error).__qualname__}: {error}"))
        running.pop(plan.rollout_id, None)
        _answer(pipe, plan.rollout_id, answer)

    def receive(message: object) -> None:
        match message:
            case _Run(plan):
                running[plan.rollout_id] = loop.create_task(run(plan))
            case _Cancel(rollout_id):
                if (task := running.get(rollout_id)) is not None:
                    task.cancel()
            case _:
                over.set()

    def listen() -> None:
        message: object = ""
        while message is not None:
            try:
                message = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):  # the parent is gone
                message = None
            loop.call_soon_threadsafe(receive, message)

    threading.Thread(target=listen, name="art-worker-pipe", daemon=True).start()
    await over.wait()
    for task in running.values():
        task.cancel()
    await asyncio.gather(*running.values(), return_exceptions=True)


def _answer(pipe: "Connection[Any, Any]", rollout_id: str, answer: object) -> None:
    try:
        message = pickle.dumps(answer)
    except Exception as unpicklable:  # the user's metadata may hold anything
        refusal = RolloutFailedError(f"rollout {rollout_id} cannot be sent back: {unpicklable}")
        message = pickle.dumps(_Refused(rollout_id, refusal))
    try:
        pipe.send_bytes(message)
    except OSError:
        logger.info("rollout %s has ended, and nobody is there to be told", rollout_id)
