"""Ledger: what a Langfuse project has confirmed, durably.

Invariant: what is in the ledger was confirmed by the server; what is not may have arrived too, and is sent
again. Losing the ledger costs requests and nothing else, since what comes twice is replaced.

It is a file beside the store, not a table of it: it belongs to a destination, of which there may be several,
it can be thrown away, and it works with a store that is only read.
"""

import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from art_core.store.marks import Mark
from art_core.store.store import Store
from art_langgraph.langfuse.client import LangfuseError

_CHUNK = 500
_TABLES = """
CREATE TABLE IF NOT EXISTS confirmed (
    destination TEXT NOT NULL, trajectory_id TEXT NOT NULL, mark BLOB NOT NULL, recorded BLOB NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (destination, trajectory_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS imported (
    destination TEXT NOT NULL, filters TEXT NOT NULL, newest TEXT NOT NULL,
    PRIMARY KEY (destination, filters)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The state in which a trajectory was confirmed: parts of its `Mark`."""

    digest: bytes
    recorded: bytes


class Ledger:
    """What was confirmed, by destination. Thread-safe; close it, or use it as a context manager.

    Args:
        path: its file, which is made where there is none.

    Raises:
        LangfuseError: the file cannot be opened, or is none of ours.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(self.path, timeout=30, check_same_thread=False, isolation_level=None)
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.executescript(_TABLES)
        except (sqlite3.Error, OSError) as broken:
            raise LangfuseError(
                f"the ledger {self.path} cannot be used: {broken}; move it away: everything is then sent "
                "again, and replaces what is there"
            ) from broken

    @classmethod
    def beside(cls, store: Store) -> Self:
        """A store's ledger: ``<project>.langfuse`` beside its file, or in ``.art`` for a database server."""
        path = Path(store.location)
        root = path.parent if path.is_file() else Path(".art")
        return cls(root / f"{store.project}.langfuse")

    def close(self) -> None:
        """Let go of the file. Closing twice is harmless."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def confirmed(self, destination: str, trajectory_ids: Sequence[str]) -> dict[str, Confirmed]:
        """In which state trajectories were confirmed; those that were not are not in it."""
        found: dict[str, Confirmed] = {}
        with self._lock:
            for start in range(0, len(trajectory_ids), _CHUNK):
                chunk = trajectory_ids[start : start + _CHUNK]
                holes = ",".join("?" * len(chunk))
                rows = self._file.execute(
                    f"SELECT trajectory_id, mark, recorded FROM confirmed WHERE destination = ? "
                    f"AND trajectory_id IN ({holes})",
                    (destination, *chunk),
                )
                found.update((row[0], Confirmed(row[1], row[2])) for row in rows)
        return found

    def confirm(self, destination: str, marks: Iterable[Mark]) -> None:
        """Keep that trajectories were confirmed, in the state that their marks tell."""
        now = time.time()
        rows = [(destination, mark.trajectory_id, mark.digest, mark.recorded, now) for mark in marks]
        with self._lock, closing(self._file.cursor()) as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            cursor.executemany("INSERT OR REPLACE INTO confirmed VALUES (?, ?, ?, ?, ?)", rows)
            cursor.execute("COMMIT")

    def last_confirmed(self, destination: str) -> float | None:
        """When something was last confirmed; Unix time, seconds."""
        with self._lock:
            query = "SELECT MAX(at) FROM confirmed WHERE destination = ?"
            return self._file.execute(query, (destination,)).fetchone()[0]

    def newest_import(self, destination: str, filters: str) -> str | None:
        """Until when traces were imported through these filters; ISO 8601."""
        with self._lock:
            query = "SELECT newest FROM imported WHERE destination = ? AND filters = ?"
            row = self._file.execute(query, (destination, filters)).fetchone()
        return row[0] if row else None

    def imported(self, destination: str, filters: str, newest: str) -> None:
        """Keep until when traces were imported through these filters."""
        with self._lock:
            self._file.execute(
                "INSERT OR REPLACE INTO imported VALUES (?, ?, ?)", (destination, filters, newest)
            )
