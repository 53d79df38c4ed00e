"""Standing: whether a run goes on, has ended, or was left behind by a process that died.

Invariant: a run counts as going on only while its process is there, or, where that cannot be known, while it
was heard of lately.
"""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Connection, func, select

from art_core.durable import process_alive
from art_core.store.records import Run, RunState
from art_core.store.schema import events, metrics, trajectories

SILENCE = 600.0
"""Seconds without a sign after which a run of a process that cannot be looked at counts as silent."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run stands.

    Attributes:
        word: a `RunState`, or ``silent``.
        tone: ``live``, ``good``, ``warn`` or ``bad``, for its colour.
        last_sign: when it was last heard of, Unix seconds.
        gone: whether its process is known not to be there any more.
    """

    word: str
    tone: str
    last_sign: float
    gone: bool = False

    @property
    def going(self) -> bool:
        """Whether more is to be expected."""
        return self.word == RunState.RUNNING


_TONES = {RunState.FINISHED: "good", RunState.STOPPED: "warn", RunState.FAILED: "bad"}


def standing(connection: Connection, run: Run) -> Standing:
    """How a run stands now."""
    if run.state is not RunState.RUNNING:
        return Standing(run.state.value, _TONES[run.state], run.ended_at or run.started_at)
    last = _last_sign(connection, run)
    alive = _alive(run.config.get("process"))
    if alive or (alive is None and time.time() - last < SILENCE):
        return Standing(RunState.RUNNING.value, "live", last)
    return Standing("silent", "warn", last, gone=alive is False)


def _last_sign(connection: Connection, run: Run) -> float:
    """When the newest metric, event or rollout of a run was written, or it began."""
    signs = [run.started_at]
    for table, when in (
        (metrics, metrics.c.created_at),
        (events, events.c.created_at),
        (trajectories, trajectories.c.started_at),
    ):
        newest = select(func.max(table.c.seq)).where(table.c.run_id == run.id).scalar_subquery()
        signs.append(connection.scalar(select(when).where(table.c.seq == newest)) or 0.0)
    return max(signs)


def _alive(process: object) -> bool | None:
    """Whether a run's process is there; None where that cannot be known from here."""
    if not isinstance(process, Mapping):
        return None
    known = cast("Mapping[str, Any]", process)
    pid = known.get("pid")
    if known.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return None
    if os.name != "posix":  # elsewhere, signal 0 is not a question
        return None
    return process_alive(pid)
