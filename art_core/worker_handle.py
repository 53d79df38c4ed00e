"""One worker process, as the process that started it sees it.

Invariant: whoever waits for the process is told: of its answer, or of its death.

Messages go over a pipe (`art_core.worker_process` says which); a thread listens for answers, and settles the
future of whoever waits. `art_core.workers` deals rollouts out to several.
"""

import asyncio
import logging
import multiprocessing
import pickle
import signal
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from art_core.errors import ConfigError, RolloutFailedError
from art_core.rollouts import Plan
from art_core.types import Trajectory
from art_core.worker_process import Begin, Broken, Cancel, Ended, Ready, Refused, Run, work

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOP_TIMEOUT = 10.0
"""Seconds that a process gets to end by itself."""

LOOK_SECONDS = 1.0
"""How often a process that has nothing to say is looked at."""


class WorkerDiedError(Exception):
    """A process has died; its rollouts are the caller's to end."""


@dataclass(eq=False)
class WorkerHandle:
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
    def start(cls, number: int) -> "WorkerHandle":
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
        """Run one rollout there.

        Raises:
            WorkerDiedError: the process died over it.
            RolloutFailedError: it cannot be sent there or back.
            ArtError: it cannot be recorded there.
        """
        try:
            run = Run(job, plan.rollout_id, pickle.dumps(plan))
        except Exception as unpicklable:  # the user's inputs may hold anything
            raise RolloutFailedError(
                f"rollout {plan.rollout_id} of scenario {plan.scenario.id!r} cannot be sent to a worker "
                f"process: {unpicklable}; inputs and metadata of its scenario must be picklable"
            ) from unpicklable
        ended: Future[Trajectory] = _uncancellable()
        with self._lock:
            if not self.alive:
                raise WorkerDiedError(f"worker process {self.number} died")
            self.running[plan.rollout_id] = ended
        waiting = asyncio.wrap_future(ended)
        try:
            self.send(run)
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
                # A child of its that lives on may hold the pipe open when the process itself has died.
                while not self.pipe.poll(LOOK_SECONDS):
                    if self.process.exitcode is not None and not self.pipe.poll():
                        raise EOFError
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
            case Ended(rollout_id, pickled) | Refused(rollout_id, pickled):
                _settle(self._take(self.running, rollout_id), _unpickled(rollout_id, pickled))
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
            _settle(ended, WorkerDiedError(died))
        self._gone.set()


def _uncancellable() -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _unpickled(rollout_id: str, pickled: bytes) -> object:
    """What came of a rollout; many an error can be pickled and not unpickled."""
    try:
        return pickle.loads(pickled)
    except Exception as unreadable:
        return RolloutFailedError(
            f"rollout {rollout_id} was sent back and cannot be read here: "
            f"{type(unreadable).__name__}: {unreadable}"
        )


def _settle(future: "Future[Any] | None", outcome: object) -> None:
    if future is None or future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
