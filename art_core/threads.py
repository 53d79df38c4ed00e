"""Threads for blocking work that may never return.

Invariant: work that hangs holds nobody else up: not its siblings, not the event loop, not the end of
the process.

The standard thread pool has a fixed number of threads, six on a machine of two cores, and is waited for
when the loop and when the interpreter end. One sync graph node that never returns would take a sixth of
every rollout's capacity, and keep the process alive for ever.
"""

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

IDLE_SECONDS = 10.0
"""How long a thread waits for more work before it ends."""

_Work = Callable[[], None]


class ElasticThreads(ThreadPoolExecutor):
    """An executor that starts a daemon thread whenever none is idle.

    It is a `ThreadPoolExecutor` because an event loop takes no other kind as its default.
    """

    def __init__(self, name: str = "art-worker") -> None:
        super().__init__(max_workers=1)
        self._name = name
        self._inbox: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._idle = 0
        self._counting = threading.Lock()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run ``fn`` in an idle thread, or in a new one."""
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._counting:
            reuse = self._idle > 0
            if reuse:
                self._idle -= 1
                self._inbox.put(work)
        if not reuse:
            threading.Thread(target=self._serve, args=(work,), name=self._name, daemon=True).start()
        return future

    def _serve(self, work: _Work) -> None:
        while True:
            work()
            del work  # or an idle thread would keep the last rollout's objects alive
            with self._counting:
                self._idle += 1
            try:
                work = self._inbox.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._counting:
                    if self._idle > 0:
                        self._idle -= 1
                        return
                # Somebody counted on this thread in the very moment in which it gave up.
                work = self._inbox.get()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Return at once: idle threads end by themselves, and hanging ones are not worth waiting for."""


async def call(executor: ElasticThreads, function: Callable[..., Any], *arguments: object) -> Any:
    """Call an async function on this loop, and a sync one in a thread that sees the same context variables.

    Args:
        executor: whose threads to use.
        function: sync or async; what a sync one returns is awaited if it can be.
        *arguments: its arguments.
    """
    # An object with an async __call__ is an async function to its user.
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await function(*arguments)
    work = partial(copy_context().run, function, *arguments)
    result = await asyncio.get_running_loop().run_in_executor(executor, work)
    return await result if inspect.isawaitable(result) else result
