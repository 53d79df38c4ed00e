"""One thread that writes: group commit.

Invariant: a job's future is done only after the transaction that holds the job is committed, and a job
that fails leaves nothing behind.

Jobs queue up while a transaction is being committed; the next one takes all of them. A *patient* job
(a step that an agent does not wait for) may linger a moment for others to share its transaction, until
somebody waits for its future. If the database refuses a batch because of what is in it, its jobs are
written one by one, so that only the faulty ones fail. If it cannot write at all (disk full, locked), all
of the batch fail and the thread lives on.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError

from art_core.errors import ArtError, StoreError
from art_core.recording import Acknowledgement
from art_core.store.codec import EncodedStep
from art_core.store.database import explain, is_of_content, writing

logger = logging.getLogger(__name__)

_MOST_JOBS = 2000  # in one transaction: bounds what one commit holds in memory, and how long it takes

LINGER_SECONDS = 0.05
"""How long patient jobs wait for company. A transaction costs as much as writing a dozen steps."""


@dataclass(slots=True, eq=False)
class Job:
    """Something to write.

    Attributes:
        what: names it in errors.
        apply: writes it; its return value becomes the future's.
        step: in place of ``apply``: a step that is written together with its neighbours.
        refused: looks up why the database's constraints refused it; None when it cannot tell.
        patient: it may linger until somebody waits for it.
    """

    what: str
    apply: Callable[[Connection], Any] | None = None
    step: EncodedStep | None = None
    refused: Callable[[Connection], Exception | None] | None = None
    patient: bool = False
    future: Future[Any] = field(default_factory=Future[Any])


class Lingering(Acknowledgement):
    """The future of a patient job."""

    def __init__(self, hurry: Callable[[], None]) -> None:
        super().__init__()
        self._hurry = hurry

    def hurry(self) -> None:
        """Write it now."""
        if not self.done():
            self._hurry()


class Writer:
    """Writes jobs in the order in which they come.

    Args:
        engine: the database.
        insert_steps: writes many steps at once.
    """

    def __init__(
        self,
        engine: Engine,
        insert_steps: Callable[[Connection, Sequence[EncodedStep]], None],
    ) -> None:
        self._engine = engine
        self._insert_steps = insert_steps
        self._jobs: deque[Job] = deque()
        self._due = False  # whether what is queued must be written without lingering
        self._closed = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="art-store-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Future[Any]:
        """Queue a job; its future cannot be cancelled, since what was recorded stays recorded."""
        if job.patient:
            job.future = Lingering(self.hurry)
        job.future.set_running_or_notify_cancel()
        with self._change:
            if self._closed:
                job.future.set_exception(StoreError(f"{job.what}: the store is closed; open it again"))
                return job.future
            self._jobs.append(job)
            self._due = self._due or not job.patient or len(self._jobs) >= _MOST_JOBS
            if self._due or len(self._jobs) == 1:
                self._change.notify()
        return job.future

    def hurry(self) -> None:
        """Write what is queued now."""
        with self._change:
            self._due = True
            self._change.notify()

    def close(self) -> None:
        """Write what is queued, then stop."""
        with self._change:
            self._closed = self._due = True
            self._change.notify()
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next_batch():
            self._write(batch)

    def _next_batch(self) -> list[Job]:
        """What to write next, all that is queued; nothing once the writer is closed and has written all."""
        with self._change:
            self._change.wait_for(lambda: self._jobs or self._closed)
            deadline = time.monotonic() + LINGER_SECONDS
            while not self._due and (left := deadline - time.monotonic()) > 0:
                self._change.wait(left)
            batch = [self._jobs.popleft() for _ in range(min(len(self._jobs), _MOST_JOBS))]
            self._due = self._closed or bool(self._jobs)
            return batch

    def _write(self, batch: list[Job]) -> None:
        try:
            results = self._transaction(batch)
        except Exception as refusal:
            if isinstance(refusal, OperationalError) and not is_of_content(refusal):
                logger.error("%d records could not be written: %s", len(batch), refusal.orig)
                for job in batch:
                    job.future.set_exception(explain(refusal, self._engine, job.what))
            # Whatever else it is, it belongs to one of the jobs: nothing of it may reach the others.
            elif len(batch) > 1:
                for job in batch:
                    self._write([job])
            else:
                batch[0].future.set_exception(self._reason(batch[0], refusal))
        else:
            for job, result in zip(batch, results, strict=True):
                job.future.set_result(result)

    def _reason(self, job: Job, refusal: Exception) -> Exception:
        if isinstance(refusal, ArtError):
            return refusal
        if not isinstance(refusal, SQLAlchemyError):
            unwritable = StoreError(f"{job.what}: cannot be written: {type(refusal).__name__}: {refusal}")
            unwritable.__cause__ = refusal
            return unwritable
        if isinstance(refusal, IntegrityError) and job.refused is not None:
            # Not even that may be possible any more.
            with suppress(SQLAlchemyError), self._engine.connect() as connection:
                if reason := job.refused(connection):
                    return reason
        return explain(refusal, self._engine, job.what)

    def _transaction(self, batch: list[Job]) -> list[Any]:
        results: list[Any] = []
        with writing(self._engine) as connection:
            for are_steps, jobs in groupby(batch, key=lambda job: job.step is not None):
                if are_steps:
                    encoded = [job.step for job in jobs if job.step is not None]
                    self._insert_steps(connection, encoded)
                    results += [None] * len(encoded)
                else:
                    results += [job.apply(connection) for job in jobs if job.apply is not None]
        return results
