"""Endings: what a run's record says of how it came to its end.

Invariant: a run has finished only if nothing cut it short, neither what was raised around it nor a guardrail.
"""

import asyncio

from art_core.errors import TrainingStoppedError
from art_core.store.records import RunState

_ENDED_EARLY = (TrainingStoppedError, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit)


def state_at_the_end(failure: BaseException | None, *, stopped: bool) -> RunState:
    """What becomes of a run whose model is closed.

    Args:
        failure: what is raised through the block that the model was open in; None when nothing is.
        stopped: whether a guardrail has stopped training, and nobody resumed it.
    """
    if isinstance(failure, _ENDED_EARLY):
        return RunState.STOPPED
    if failure is not None and not _asked_for(failure):
        return RunState.FAILED
    return RunState.STOPPED if stopped else RunState.FINISHED


def in_words(failure: BaseException) -> str:
    """What was raised, in a line."""
    return f"{type(failure).__name__}: {failure}".rstrip(": ")


def _asked_for(failure: BaseException) -> bool:
    """Whether a script ends itself, and says that all is well."""
    return isinstance(failure, SystemExit) and failure.code in (None, 0)
