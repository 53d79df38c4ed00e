"""The current rollout: which one the calls made in a context belong to.

Invariant: a step belongs to exactly one rollout, or it is counted as unattributed and said aloud.

A rollout lives in a context variable, so concurrent rollouts (tasks, threads started with a copied
context) never mix. What a `Rollout` is, and where it is kept, is in `art_core.rollout` and `art_core.sinks`;
their names are here, too.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import TypeVar, cast

from art_core.ids import new_id
from art_core.open_rollouts import ROLLOUT_HEADER, open_rollout, open_rollouts
from art_core.rollout import Rollout
from art_core.sinks import Acknowledgement, NullSink, Sink
from art_core.types import StepIdentity

__all__ = [
    "ROLLOUT_HEADER",
    "Acknowledgement",
    "NullSink",
    "Rollout",
    "Sink",
    "context_is_known",
    "current_rollout",
    "identity_here",
    "new_id",
    "open_rollout",
    "open_rollouts",
    "recording",
    "restore",
    "set_current_rollout",
]

T = TypeVar("T")

Place = Callable[[Rollout], StepIdentity]
"""Says where in an agent the code that calls it is, and numbers the call that is about to be made there."""

_current: ContextVar[Rollout | None] = ContextVar("art_rollout")
_place: ContextVar[Place | None] = ContextVar("art_place", default=None)

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
def recording(rollout: Rollout, *, place: Place | None = None) -> Generator[Rollout]:
    """Make a rollout the current one inside the block.

    Args:
        rollout: what calls made here belong to.
        place: says where in the agent they are made; None: whoever said it before.
    """
    token = _current.set(rollout)
    placed = None if place is None else _place.set(place)
    try:
        yield rollout
    finally:
        if placed is not None:
            restore(_place, placed, place)
        restore(_current, token, rollout)


def restore(variable: ContextVar[T], token: Token[T], mine: T) -> None:
    """Give a context variable the value back that it had.

    Also where a block is left in another context than it was entered in: a generator that is closed by
    somebody else, or whose reader takes each part in a task of its own. There ``mine`` is taken away, where
    that context has it, and nothing else.
    """
    try:
        variable.reset(token)
    except ValueError:
        if variable.get(None) is mine and token.old_value is not Token.MISSING:
            variable.set(cast("T", token.old_value))


def identity_here() -> StepIdentity:
    """Where in the agent a call of the current rollout is about to be made; empty where nobody knows."""
    rollout, place = current_rollout(), _place.get()
    return StepIdentity() if rollout is None or place is None else place(rollout)
