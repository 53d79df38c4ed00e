"""Calls of a `ChatART` that are under way, for who ends their rollout.

Invariant: a call is recorded once: by itself when it ends, or, if it is still under way when its rollout
ends, by who ends that. What it comes to afterwards is counted, and said.
"""

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from art_core.recording import Rollout
from art_core.tap import UNFINISHED, Exchange
from art_langgraph.calls import current_loop, current_task

logger = logging.getLogger(__name__)

CANCELLED = "cancelled: the call never ended"
"""The error of a call whose caller has gone."""

STILL_RUNNING = "still running when the rollout ended"
"""The error of a call that goes on in a thread or a task of its own."""


class CallUnderWay:
    """One call between its beginning and its end.

    Args:
        rollout: whose it is; None: nobody's.
        exchange: what is asked and answered.
        record: keeps what the exchange came to; given why there is no answer, where there is none.
    """

    def __init__(
        self, rollout: Rollout | None, exchange: Exchange, record: Callable[[str | None], None]
    ) -> None:
        self._rollout = rollout
        self._exchange = exchange
        self._record = record
        task = current_task()
        self._task: weakref.ref[asyncio.Task[Any]] | None = None if task is None else weakref.ref(task)
        self._thread = threading.current_thread()
        self.loop = current_loop()
        if rollout is not None:
            with _lock:
                _calls.setdefault(rollout.id, set()).add(self)

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for it any more: its end may not come."""
        if self._task is None:
            return self._thread is threading.current_thread()
        task = self._task()
        # Who asks has gone on from the call, if it was its own.
        return task is None or task.done() or task is current_task()

    def end(self, error: BaseException | None) -> None:
        """It has ended: record it, unless that was done when its rollout ended."""
        if self._rollout is None or self._taken():
            self._record(None if error is None else problem_of(error))
        elif not isinstance(error, GeneratorExit | asyncio.CancelledError):
            self._rollout.count_fault("late_calls")
            logger.warning("rollout %s had ended when one of its calls did", self._rollout.id)

    def close(self) -> None:
        """The rollout ends: record it as far as it has come."""
        if self._rollout is None or not self._taken():
            return
        if not self.abandoned:
            self._rollout.count_fault("unfinished_calls")
            self._record(STILL_RUNNING)
        elif self._exchange.first_token_at is not None:
            self._record(UNFINISHED)  # a stream that its reader has left, and Python not yet closed
        else:
            self._rollout.count_fault("cancelled_calls")
            self._record(CANCELLED)

    def _taken(self) -> bool:
        """Take it off the list; whether it was still there."""
        assert self._rollout is not None, "nobody's call is on no list"
        with _lock:
            calls = _calls.get(self._rollout.id, set())
            if self not in calls:
                return False
            calls.remove(self)
            if not calls:
                del _calls[self._rollout.id]
            return True


_lock = threading.Lock()
_calls: dict[str, set[CallUnderWay]] = {}


def calls_under_way(rollout: Rollout) -> tuple[CallUnderWay, ...]:
    """The calls of a rollout that have not ended."""
    with _lock:
        return tuple(_calls.get(rollout.id, ()))


def problem_of(error: BaseException) -> str:
    """Why a call that raised has no answer."""
    if isinstance(error, GeneratorExit):
        return UNFINISHED  # its reader left
    return f"{type(error).__name__}: {error}".removesuffix(": ")
