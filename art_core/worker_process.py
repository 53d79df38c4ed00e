"""A worker process from the inside, and what goes over its pipe.

Invariant: every `Run` is answered by one `Ended` or `Refused`, every `Begin` by one `Ready` or `Broken`; when
the parent is gone, the process ends.

To the process: `Begin` for each job (a process that is kept gets several), then `Run` and `Cancel`, `Forget`
when a job is over, and None at the end. What users had a part in is pickled inside a message, and unpickled
where a failure can be answered.
"""

import asyncio
import logging
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from art_core.errors import ArtError, RolloutFailedError
from art_core.rollouts import Agent, InProcess, Plan, Terms

logger = logging.getLogger(__name__)

ORPHAN_GRACE = 10.0
"""Seconds that a process without a parent gets to end its rollouts, and itself."""


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


@dataclass(frozen=True, slots=True)
class Begin:
    """Build the agent of a job."""

    job: int
    pickled: bytes


@dataclass(frozen=True, slots=True)
class Run:
    """Run one rollout of a job, by its pickled `Plan`."""

    job: int
    rollout_id: str
    pickled: bytes


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a rollout as cancelled."""

    rollout_id: str


@dataclass(frozen=True, slots=True)
class Forget:
    """A job is over."""

    job: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The agent of a job is built."""

    job: int


@dataclass(frozen=True, slots=True)
class Broken:
    """It could not be built."""

    job: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A rollout has ended, with this pickled trajectory."""

    rollout_id: str
    pickled: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The rollout could not even be recorded; the pickled error is the parent's to raise."""

    rollout_id: str
    pickled: bytes


def work(pipe: "Connection[Any, Any]") -> None:
    """What the process does."""
    # An interrupt from the terminal reaches every process; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_Serving(pipe).serve())


class _Serving:
    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self._pipe = pipe
        self._sending = threading.Lock()
        self._runners: dict[int, InProcess] = {}
        self._rollouts: dict[str, asyncio.Task[None]] = {}
        self._builds: set[asyncio.Task[None]] = set()
        self._jobs: set[int] = set()
        self._over = asyncio.Event()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop,), name="art-worker-pipe", daemon=True).start()
        await self._over.wait()
        for task in self._rollouts.values():
            task.cancel()
        await asyncio.gather(*self._rollouts.values(), return_exceptions=True)

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        message: object = ""
        orphaned = False
        while message is not None:
            try:
                message = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):  # the parent is gone
                message, orphaned = None, True
            loop.call_soon_threadsafe(self._receive, message)
        if orphaned:
            # Nobody is left to kill a process that a hanging thread of its agent's keeps from ending.
            time.sleep(ORPHAN_GRACE)
            os._exit(1)

    def _receive(self, message: object) -> None:
        match message:
            case Begin(job, pickled):
                self._jobs.add(job)
                build = asyncio.create_task(self._build(job, pickled))
                self._builds.add(build)
                build.add_done_callback(self._builds.discard)
            case Run(job, rollout_id, pickled):
                self._rollouts[rollout_id] = asyncio.create_task(self._run(job, rollout_id, pickled))
            case Cancel(rollout_id):
                if (task := self._rollouts.get(rollout_id)) is not None:
                    # Once it has begun: a task that is cancelled before that never runs, and answers nothing.
                    asyncio.get_running_loop().call_soon(task.cancel)
            case Forget(job):
                self._jobs.discard(job)
                self._runners.pop(job, None)
            case _:
                self._over.set()

    async def _build(self, job: int, pickled: bytes) -> None:
        def build() -> InProcess:
            unpickled: Job = pickle.loads(pickled)
            return InProcess(unpickled.build(*unpickled.arguments), unpickled.terms)

        try:
            # In a thread: a user's factory may run an event loop of its own.
            runner = await asyncio.to_thread(build)
        except BaseException as broken:
            last = traceback.format_exception_only(broken)[-1].strip()
            self._send(Broken(job, last))
            return
        if job in self._jobs:  # it may have been over before this
            self._runners[job] = runner
        self._send(Ready(job))

    async def _run(self, job: int, rollout_id: str, pickled: bytes) -> None:
        try:
            plan: Plan = pickle.loads(pickled)
            trajectory = await self._runners[job].run(plan)
            try:
                answer: Ended | Refused = Ended(rollout_id, pickle.dumps(trajectory))
            except Exception as unpicklable:  # the user's metadata may hold anything
                raise RolloutFailedError(f"rollout {rollout_id} cannot be sent back: {unpicklable}") from None
        except asyncio.CancelledError:
            answer = _refused(rollout_id, RolloutFailedError(f"rollout {rollout_id} was cancelled"))
        except Exception as error:
            answer = _refused(rollout_id, error)
        self._rollouts.pop(rollout_id, None)
        self._send(answer)

    def _send(self, answer: object) -> None:
        message = pickle.dumps(answer)
        try:
            with self._sending:
                self._pipe.send_bytes(message)
        except OSError:
            logger.info("the parent is gone and is not told of %s", type(answer).__name__)


def _refused(rollout_id: str, error: Exception) -> Refused:
    if isinstance(error, ArtError):
        with suppress(Exception):  # somebody's own kind of it may not be picklable
            return Refused(rollout_id, pickle.dumps(error))
    told = RolloutFailedError(f"{type(error).__qualname__}: {error}")
    return Refused(rollout_id, pickle.dumps(told))
