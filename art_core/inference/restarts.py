"""How often a server may be restarted.

Invariant: within any window of so many seconds no more than the budget's restarts begin.
"""

import threading
import time
from collections import deque
from collections.abc import Callable


class RestartBudget:
    """Counts restarts in a sliding window.

    Args:
        most: restarts within the window.
        window: seconds.
        clock: seconds that only grow.
    """

    def __init__(self, most: int, window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.window = window
        self._clock = clock
        self._lock = threading.Lock()
        self._begun: deque[float] = deque()

    def take(self) -> bool:
        """Begin a restart, if one is left."""
        with self._lock:
            now = self._clock()
            while self._begun and now - self._begun[0] >= self.window:
                self._begun.popleft()
            if len(self._begun) >= self.most:
                return False
            self._begun.append(now)
            return True
