"""The rollouts of this process that are open.

Invariant: a rollout is here from its beginning until it has ended or was paused, or until nobody holds it.
"""

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from art_core.rollout import Rollout

ROLLOUT_HEADER = "x-art-rollout"
"""HTTP header of clients that record their calls themselves: into which rollout. A gateway sends its calls to
one replica, and does not keep them."""

_open: "weakref.WeakValueDictionary[str, Rollout]" = weakref.WeakValueDictionary()


def opened(rollout: "Rollout") -> None:
    """A rollout has begun, or goes on."""
    _open[rollout.id] = rollout


def closed(rollout: "Rollout") -> None:
    """A rollout has ended, or was paused."""
    _open.pop(rollout.id, None)


def open_rollouts() -> "tuple[Rollout, ...]":
    """The rollouts of this process that have not ended."""
    return tuple(_open.values())


def open_rollout(rollout_id: str) -> "Rollout | None":
    """The rollout of this process with this id, if it has not ended."""
    return _open.get(rollout_id)
