"""A model is trained by one process at a time, from its newest version on.

Invariant: whoever holds the turn began from the newest checkpoint, and nobody else writes one meanwhile.

Two that trained one model in turns would each go on from weights without what the other one learned. Others
may serve it, and read what is on disk, at any time.
"""

import logging
from pathlib import Path

from filelock import FileLock, Timeout

from art_core.errors import CheckpointError

logger = logging.getLogger(__name__)

FILE_NAME = ".training.lock"


class TrainingTurn:
    """The right to train one model; the operating system takes it back when the process dies.

    Args:
        model: its name, for people.
        directory: of its checkpoints.

    Attributes:
        began_from: number of the checkpoint that this process went on from, the newest then; 0 without any.
    """

    def __init__(self, model: str, directory: Path) -> None:
        self.began_from = 0
        self._model = model
        self._directory = directory
        # The turn is the registration's, whichever thread takes it and whichever gives it back.
        self._lock = FileLock(directory.parent / FILE_NAME, blocking=False, thread_local=False)

    def take(self) -> None:
        """Take the turn, unless it is held here.

        Raises:
            CheckpointError: another process has it, or had it since this one read the newest checkpoint.
        """
        if self._lock.is_locked:
            return
        try:
            self._lock.acquire()
        except Timeout:
            raise CheckpointError(
                f"model {self._model!r} in {self._directory.parent} is being trained by somebody else, in "
                "this process or another: close that one first, or let a model of another name begin from "
                "this one (LocalBackend.fork)"
            ) from None
        except (NotImplementedError, OSError) as unable:
            logger.warning(
                "%s cannot be locked (%s): that nobody else trains model %r is not checked",
                self._directory.parent,
                unable,
                self._model,
            )
            return
        if (newest := self._newest()) > self.began_from:
            self._lock.release()
            raise CheckpointError(
                f"model {self._model!r} was trained by somebody else since it was registered here: its "
                f"newest version in {self._directory.parent} is {newest}, and it was {self.began_from}; "
                "register it again to go on from there"
            )

    def give_back(self) -> None:
        """Let others train it; does nothing where it is not held."""
        self._lock.release()

    def _newest(self) -> int:
        from art_core.training import checkpoints

        newest = checkpoints.latest(self._directory)
        return 0 if newest is None else checkpoints.number_of(newest)
