"""An open database with its one writer: what every part of a store is made of.

Invariant: what was handed to the writer is committed, or raised, before `OpenStore.close` returns; a fork
of the process that opened it cannot write.
"""

import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, insert

from art_core.errors import StoreError
from art_core.store import codec, reading
from art_core.store.database import location, open_database
from art_core.store.database import reading as read_transaction
from art_core.store.schema import runs
from art_core.store.sink import insert_steps
from art_core.store.writer import Job, Writer

T = TypeVar("T")


class OpenStore:
    """A database of one project, open for reading and writing; thread-safe.

    Attributes:
        project: whose it is.
        location: the file, or the URL without its password.
    """

    def __init__(self, project: str, url: Any) -> None:
        self.project = project
        self._engine = open_database(url, project)
        self.location = location(self._engine)
        self._writer = Writer(self._engine, insert_steps)
        self._process = os.getpid()
        # Also when the store is forgotten without being closed, and when the interpreter ends.
        self._finish = weakref.finalize(self, _shut, self._writer, self._engine, self._process)

    def close(self) -> None:
        """Write what is queued, then let go of the database. Closing twice is harmless."""
        self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def read(self) -> AbstractContextManager[Connection]:
        """A transaction for queries of one's own over the tables of `art_core.store.schema`.

        Used as in ``with store.read() as connection``. It sees one state of the database, and must not write.
        """
        return read_transaction(self._engine)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StoreError(
                f"{self.location} was opened by process {self._process}, and this one is a fork of it: "
                "open the store again here"
            )

    def _run(self, job: Job) -> Any:
        self._check_process()
        return self._writer.submit(job).result()

    def _write(self, what: str, apply: Callable[[Connection], T], run_id: str | None = None) -> T:
        return self._run(
            Job(what, apply=apply, refused=lambda connection: self._unknown_run(connection, what, run_id))
        )

    def _insert(self, what: str, table: Any, row: codec.Row, run_id: str | None = None) -> None:
        def apply(connection: Connection) -> None:
            connection.execute(insert(table), row)

        self._write(what, apply, run_id)

    def _unknown_run(self, connection: Connection, what: str, run_id: str | None) -> StoreError | None:
        if run_id is None or reading.read_runs(connection, runs.c.id == run_id):
            return None
        return StoreError(f"{what}: {self.location} has no run {run_id}; begin_run gives one")


def _shut(writer: Writer, engine: Any, process: int) -> None:
    if os.getpid() == process:  # a fork has no writer thread to wait for
        writer.close()
        engine.dispose()
