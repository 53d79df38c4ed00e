"""The current rollout: which one the calls made in a context belong to.

Invariant: a step belongs to exactly one rollout, or it is counted as unattributed and said aloud.

A rollout lives in a context variable, so concurrent rollouts (tasks, threads started with a copied
context) never mix. What a `Rollout` is, and where it is kept, is in `art_core.rollout` and `art_core.sinks`;
their names are here, too.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from art_core.ids import new_id
from art_core.open_rollouts import ROLLOUT_HEADER, open_rollout, open_rollouts
from art_core.rollout import Rollout
from art_core.sinks import Acknowledgement, NullSink, Sink

__all__ = [
    "ROLLOUT_HEADER",
    "Acknowledgement",
    "NullSink",
    "Rollout",
    "Sink",
    "context_is_known",
    "current_rollout",
    "new_id",
    "open_rollout",
    "open_rollouts",
    "recording",
    "set_current_rollout",
]

_current: ContextVar[Rollout | None] = ContextVar("art_rollout")


_UNSAID = object()


def current_rollout() -> Rollout | None:
    """The rollout that calls made here belong to."""
    rollout = _current.get(None)
    return None if rollout is None or rollout.ended else rollout


def context_is_known() -> bool:
    """Whether this context says which rollout it belongs to, be it none (a judge's has none).

    False where nothing was ever said: outside of rollouts, and in a thread that was started without a
    copy of the context.
    """
    return _current.get(_UNSAID) is not _UNSAID


def set_current_rollout(rollout: Rollout | None) -> None:
    """Make a rollout the current one of this context (of this task, of this thread)."""
    _current.set(rollout)


@contextmanager
def recording(rollout: Rollout) -> Generator[Rollout]:
    """Make a rollout the current one inside the block."""
    token = _current.set(rollout)
    try:
        yield rollout
    finally:
        _current.reset(token)
