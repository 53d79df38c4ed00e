"""Which policy versions are served, and who uses them.

Invariant: a version that a request has entered stays until that request has left.
"""

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from art_core.errors import EngineError
from art_core.types import PolicyVersion


class UnknownModelError(EngineError):
    """A request names a model that is not served."""


class ServedVersions:
    """The table of served versions. Thread-safe.

    Args:
        model: the policy's name; requests may use it for the newest version.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._lock = threading.RLock()
        self._served: list[PolicyVersion] = []

    def add(self, version: PolicyVersion) -> None:
        """Serve a version; it is the newest if its number is the highest."""
        with self._lock:
            self._served = sorted([*self._served, version], key=lambda v: v.number)

    def remove(self, version: PolicyVersion) -> bool:
        """Take no more requests for it; False when it was not served."""
        with self._lock:
            if version not in self._served:
                return False
            self._served.remove(version)
            return True

    def list(self) -> Sequence[PolicyVersion]:
        """Oldest first."""
        with self._lock:
            return tuple(self._served)

    @contextmanager
    def entering(self, name: str) -> Generator[PolicyVersion]:
        """`resolve`, and no version is removed inside the block: time to hand a request over.

        Raises:
            UnknownModelError: nothing of that name is served.
        """
        with self._lock:
            yield self.resolve(name)

    def resolve(self, name: str) -> PolicyVersion:
        """The version that a request's ``model`` stands for.

        Raises:
            UnknownModelError: nothing of that name is served; the message lists what is.
        """
        served = self.list()
        for version in served:
            if name == version.name:
                return version
        if name == self.model and served:
            return served[-1]
        known = ", ".join(v.name for v in served) or "nothing yet: no version was published"
        raise UnknownModelError(f"no model {name!r} is served here; served: {known}")
