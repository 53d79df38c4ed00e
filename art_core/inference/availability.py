"""Availability: whether a server that may die and come back can be asked now.

Invariant: a request whose answer did not come is sent again only to a later life of its server, at most
`MAX_LIVES` times; a connection that merely broke is left to the client, whose retries are for that. Who knows
a server's address alone cannot tell the two apart where it is back at once, and sends again.

Whoever sends requests asks `Availability.ready` for the life that they go to, and after a failure
`Availability.lost`, which says whether there is a new life to send them to. Both wait for as long as a
restart takes, and no longer than its owner said where it is held. The engine's watchdog moves `ServerLives`
on from its own thread; threads and tasks of any event loop wait on it.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from art_core.errors import EngineError

MAX_LIVES = 4
"""To how many lives of a server one request is sent: one that kills each must not kill them for ever."""


HELD_TOO_LONG = (
    "the server sleeps while the trainer has its GPU (colocate=True), or reads new weights; ask again later, "
    "raise EngineConfig.hold_timeout and the client's own timeout, or give vLLM a GPU of its own "
    "(devices=('1',)), so that it need not sleep"
)
"""The way out for who waited at a server that was held."""


class HeldTooLongError(EngineError):
    """A server was held for longer than a request waits; nothing is wrong with it."""


class Availability(Protocol):
    """Whether a server can be asked. Lives are numbered; async names carry an ``a``."""

    def ready(self) -> int:
        """Wait until requests can be sent; which life of the server they go to.

        Raises:
            EngineError: it is dead, and will not come back, or is held for too long.
        """
        ...

    async def aready(self) -> int:
        """The same for tasks."""
        ...

    def lost(self, life: int, *, looks_restarted: bool = False) -> bool:
        """After a request to this life failed: whether to send it again (the server has come back).

        Args:
            life: that it was sent to.
            looks_restarted: it failed as requests do when a server dies or has just begun: the connection was
                refused or broke, or the model was not known.

        Raises:
            EngineError: the server is dead, and will not come back.
        """
        ...

    async def alost(self, life: int, *, looks_restarted: bool = False) -> bool:
        """The same for tasks."""
        ...


@runtime_checkable
class Restartable(Protocol):
    """What may be restarted: engines, endpoints on them, models."""

    @property
    def availability(self) -> Availability:
        """To be asked before and after requests."""
        ...


class AlwaysAvailable:
    """A server that nobody restarts."""

    def ready(self) -> int:  # noqa: D102 - the protocol says it
        return 0

    async def aready(self) -> int:  # noqa: D102
        return 0

    def lost(self, life: int, *, looks_restarted: bool = False) -> bool:  # noqa: D102
        return False

    async def alost(self, life: int, *, looks_restarted: bool = False) -> bool:  # noqa: D102
        return False


ALWAYS = AlwaysAvailable()


def availability_of(server: Any) -> Availability:
    """Of an engine or endpoint; `ALWAYS` where it cannot be restarted."""
    return server.availability if isinstance(server, Restartable) else ALWAYS


async def aup(server: Availability) -> int:
    """Like `Availability.aready`, for who acts on a server and not through it: holds are not waited for."""
    return await (server.aup() if isinstance(server, ServerLives) else server.aready())


class ServerLives:
    """The lives of one server, one after the other. Thread-safe.

    Args:
        check: asks the watchdog to look at the server soon; called from any thread, returns at once.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._lock = threading.Lock()
        self._waiters: list[Future[None]] = []
        self._life = 0
        self._up = False
        self._closed = True
        self._held = False
        self._patience: float | None = None
        self._error: EngineError | None = None
        self._looks = 0
        self._found_well = 0

    # -- the watchdog's side -----------------------------------------------------------------------

    @property
    def life(self) -> int:
        """The number of the newest life; 0 before the first."""
        return self._life

    @property
    def up(self) -> bool:
        """Whether requests may be sent now."""
        return self._up

    @property
    def error(self) -> EngineError | None:
        """Why it will not come back; None while it may."""
        return self._error

    def begin(self) -> None:
        """A new life has begun: it answers, and serves what it should."""
        self._change(life=self._life + 1, up=True, closed=False, error=None)

    def down(self) -> None:
        """It does not answer now, and may come back: requests wait."""
        self._change(up=False)

    def end(self, error: EngineError) -> None:
        """It is dead for good: whoever waits gets the error."""
        self._change(up=False, error=error)

    def close(self) -> None:
        """It was closed on purpose: requests fail as they would without anybody watching."""
        self._change(up=False, closed=True, held=False, error=None)

    def hold(self, patience: float | None = None) -> None:
        """Requests wait until `release`, though it answers: its owner has something to do first.

        Args:
            patience: seconds that each waits at most; None: for as long as it takes.
        """
        self._change(held=True, patience=patience)

    def release(self) -> None:
        """Requests may be sent again."""
        self._change(held=False)

    async def aup(self) -> int:
        """Like `aready`, for the owner's own acts: they do not wait for `release`."""
        while isinstance(verdict := self._can_send(owner=True), Future):
            await asyncio.wrap_future(verdict)
        return verdict

    def look(self) -> int:
        """A look at the server begins; its number, for `found_well`."""
        with self._lock:
            self._looks += 1
            return self._looks

    def found_well(self, look: int) -> None:
        """The look found nothing wrong: what failed before it began failed for another reason."""
        with self._lock:
            self._found_well = max(self._found_well, look)
            waiters, self._waiters = self._waiters, []
        _wake(waiters)

    def _change(self, **state: Any) -> None:
        with self._lock:
            for name, value in state.items():
                setattr(self, f"_{name}", value)
            waiters, self._waiters = self._waiters, []
        _wake(waiters)

    # -- the clients' side -------------------------------------------------------------------------

    def ready(self) -> int:  # noqa: D102 - the protocol says it
        began = time.monotonic()
        while isinstance(verdict := self._can_send(), Future):
            with self._patient(began) as left:
                verdict.result(left)
        return verdict

    async def aready(self) -> int:  # noqa: D102
        began = time.monotonic()
        while isinstance(verdict := self._can_send(), Future):
            with self._patient(began) as left:
                await asyncio.wait_for(asyncio.wrap_future(verdict), left)
        return verdict

    @contextmanager
    def _patient(self, began: float) -> Generator[float | None]:
        """How many seconds are left of a wait that began then; None where nobody counts them."""
        patience = self._patience if self._held and self._up else None
        try:
            yield None if patience is None else max(0.0, began + patience - time.monotonic())
        except TimeoutError:
            raise HeldTooLongError(f"the request was held for {patience:g} s: {HELD_TOO_LONG}") from None

    def lost(self, life: int, *, looks_restarted: bool = False) -> bool:  # noqa: D102
        seen = self._report(life)
        while isinstance(verdict := self._came_back(life, seen), Future):
            verdict.result()
        return verdict

    async def alost(self, life: int, *, looks_restarted: bool = False) -> bool:  # noqa: D102
        seen = self._report(life)
        while isinstance(verdict := self._came_back(life, seen), Future):
            await asyncio.wrap_future(verdict)
        return verdict

    def _can_send(self, *, owner: bool = False) -> "int | Future[None]":
        with self._lock:
            if self._error is not None:
                raise EngineError(str(self._error))
            if (self._up and (owner or not self._held)) or self._closed:
                return self._life
            return self._wait()

    def _report(self, life: int) -> int:
        """Have the server looked at; only looks after the one that is returned count."""
        with self._lock:
            seen = self._looks
            news = self._life != life or self._closed
        if not news:
            self._check()
        return seen

    def _came_back(self, life: int, seen: int) -> "bool | Future[None]":
        with self._lock:
            if self._error is not None:
                raise EngineError(str(self._error))
            if self._closed:
                return False
            if self._up and self._life != life:
                return True
            if self._up and self._found_well > seen:
                return False
            return self._wait()

    def _wait(self) -> "Future[None]":
        waiter: Future[None] = Future()
        self._waiters.append(waiter)
        return waiter


def _wake(waiters: list["Future[None]"]) -> None:
    for waiter in waiters:
        if waiter.set_running_or_notify_cancel():  # False: whoever waited was cancelled
            waiter.set_result(None)
