"""Judgings: what judges took while one trajectory's reward was worked out, kept with that trajectory.

Invariant: every judgement that a reward asked for is kept, also when the reward came to nothing.

Whoever works a reward out opens a list (`keeping`); judges put what they took into the one that is open,
however deep they stand in a composed reward; the trajectory's metadata has it under `JUDGINGS`.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

JUDGINGS = "judgings"
"""Key of a trajectory's metadata: one entry for each judgement that its reward asked for."""

_open: ContextVar[list[Mapping[str, Any]] | None] = ContextVar("art_judgings", default=None)


def keeping() -> list[Mapping[str, Any]]:
    """A new list for what judges take from now on in this task and in those that it starts."""
    kept: list[Mapping[str, Any]] = []
    _open.set(kept)
    return kept


def keep(judging: Mapping[str, Any]) -> None:
    """Put what a judgement took into the list that is open, if one is."""
    kept = _open.get()
    if kept is not None:
        kept.append(judging)
