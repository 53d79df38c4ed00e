"""When a run begins nothing more: its time is over, or somebody told it to end.

Invariant: a run is asked before each piece of work, and once it has a reason to end it keeps that reason.

The first SIGTERM or SIGINT gives up agents that run; what is learnt already is measured and written. The
second one ends the program where it is.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SAME_SIGNAL = 1.0
"""Seconds within which a second signal is the first one: ``timeout`` sends each to process and group."""


class Stopping:
    """Knows how much time a run has, and listens to signals.

    Args:
        minutes: that the run has from now on; None: as many as it takes.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self._began = time.monotonic()
        self._seconds = None if minutes is None else 60 * minutes
        self._told = asyncio.Event()
        self._told_at = 0.0
        self.signal: signal.Signals | None = None

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    def listen(self, tell: Callable[[str], None]) -> None:
        """From now on signals end the task that runs, and no longer the process.

        Args:
            tell: is told what a signal has set going.
        """
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.heard, number, task, tell)

    def heard(self, number: signal.Signals, task: asyncio.Task[Any], tell: Callable[[str], None]) -> None:
        """There was a signal: the first one asks for an end, the second one cancels the task."""
        if self.signal is None:
            self.signal, self._told_at = number, time.monotonic()
            self._told.set()
            tell(f"{number.name}: a last evaluation, then it ends; once more ends it at once")
        elif time.monotonic() - self._told_at > SAME_SIGNAL:
            task.cancel()

    def reason(self, needed: float = 0.0) -> str | None:
        """Why nothing more should begin, or None.

        Args:
            needed: seconds that it would take, with all that has to come after it.
        """
        if self.signal is not None:
            return self.signal.name
        if self._seconds is not None and self.seconds + needed > self._seconds:
            return "time"
        return None

    async def unless_told(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What comes of the work; None when a signal comes first, and the work is cancelled."""
        task, told = asyncio.create_task(work), asyncio.create_task(self._told.wait())
        try:
            await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            for one in (task, told):
                one.cancel()
            await asyncio.gather(task, told, return_exceptions=True)
