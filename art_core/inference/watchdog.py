"""A watchdog: a thread that looks at something again and again, and at once when asked to.

Invariant: it keeps alive neither what it watches nor the process; it looks between `start` and `close` alone.
"""

import logging
import threading
import weakref
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Watchdog:
    """Calls a bound method from a thread of its own.

    Args:
        look: the method; its object is held weakly. What it raises is logged, and it is called again.
        interval: seconds between two looks that nobody asked for.
        name: of the thread.
    """

    def __init__(self, look: Callable[[], None], *, interval: float, name: str) -> None:
        self._look = weakref.WeakMethod(look)
        self._interval = interval
        self._name = name
        self._wanted = threading.Event()
        self._closed = True
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look from now on."""
        self._closed = False
        self._wanted.clear()
        self._thread = threading.Thread(target=self._watch, name=self._name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look soon; from any thread."""
        self._wanted.set()

    def close(self) -> None:
        """Stop, and wait for the look that is under way. Closing twice does nothing."""
        self._closed = True
        self._wanted.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _watch(self) -> None:
        while True:
            self._wanted.wait(self._interval)
            self._wanted.clear()
            look = None if self._closed else self._look()
            if look is None:
                return
            try:
                look()
            except Exception:
                logger.exception("the watchdog %s failed at a look; it goes on", self._name)
            del look
