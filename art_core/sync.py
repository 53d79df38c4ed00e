"""The sync face of async code: one event loop in a thread of its own, for the whole process.

Invariant: a sync call and the async call it stands for run the same code, on one loop, so that what
belongs to a loop (HTTP clients, locks) is made once.
"""

import asyncio
import atexit
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


INTERRUPT_GRACE = 15.0
"""Seconds that interrupted work gets to clean up."""


class _Portal:
    """Runs coroutines on its own loop; started when first used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(target=self._loop.run_forever, name="art-sync", daemon=True)
                thread.start()
                atexit.register(self._loop.call_soon_threadsafe, self._loop.stop)
            return self._loop


_portal = _Portal()


def run_sync(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end from sync code, in a copy of the caller's context.

    Raises:
        KeyboardInterrupt: the user interrupted; the coroutine was cancelled, and has ended.
        RuntimeError: called on the very loop that would have to run it.
    """
    loop = _portal.loop()
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        raise RuntimeError(
            "a sync call from inside the sync face's own loop would wait for itself; use the a...() form"
        )
    context = contextvars.copy_context()

    work: list[asyncio.Task[Any]] = []
    ended = threading.Event()

    async def in_context() -> T:
        work.append(asyncio.create_task(make(), context=context))
        try:
            return await work[0]
        finally:
            ended.set()

    def stop() -> None:
        if not work:
            ended.set()
        for task in work:
            task.cancel()

    try:
        return asyncio.run_coroutine_threadsafe(in_context(), loop).result()
    except KeyboardInterrupt:
        # It interrupts the waiting, not the work, which would go on in its thread.
        loop.call_soon_threadsafe(stop)
        ended.wait(INTERRUPT_GRACE)
        raise
