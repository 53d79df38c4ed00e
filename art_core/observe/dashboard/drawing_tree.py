"""A token tree, drawn: tokens from left to right, rows from top to bottom, as high as they are shared.

Invariant: a stretch is as high as the rows that pass through it, and what begins at the same depth begins at
the same place; long stretches are drawn shorter than they are, and the scale says so.

An axis of tokens would be nothing but the prompt. So each part of the axis between two depths at which
something begins or ends is as wide as the square root of its tokens, and never thinner than a few pixels.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from art_core.observe.dashboard.token_trie import Stretch, TokenTrie

WIDTH = 1000.0
ROW = 17.0
"""Height of one row, in pixels."""

MOST_ROWS = 300
"""Rows that are drawn; the others are counted."""

_LEAST = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnStretch:
    """A box of the tree.

    Attributes:
        number: of its stretch.
        label: how many tokens, where there is room to say so.
        title: for a tooltip and for who cannot see it.
        sampled: left and width of what the policy sampled.
        shared: how many rollouts pass through it.
    """

    number: int
    x: float
    y: float
    width: float
    height: float
    label: str
    title: str
    sampled: tuple[tuple[float, float], ...]
    shared: int


@dataclass(frozen=True, slots=True)
class DrawnTree:
    """A drawn token tree; sizes in pixels.

    Attributes:
        stretches: depth first.
        ends: for each row that is drawn: its rollout's number, and where it ends.
        ticks: depths, and where they are.
        left_out: rows that are not drawn.
    """

    width: float
    height: float
    stretches: tuple[DrawnStretch, ...]
    ends: tuple[tuple[int, float, float], ...]
    ticks: tuple[tuple[int, float], ...]
    left_out: int


def draw_tree(trie: TokenTrie, members: int) -> DrawnTree:
    """Place a token tree.

    Args:
        trie: of a group.
        members: rollouts of the group.
    """
    shown = min(len(trie.rows), MOST_ROWS)
    stretches = [s for s in trie.walk() if s.rows.start < shown]
    scale = _Scale(sorted({d for s in stretches for d in (s.start, s.end)}))
    drawn: list[DrawnStretch] = []
    for s in stretches:
        x, wide = scale.at(s.start), scale.at(s.end) - scale.at(s.start)
        high = (min(s.rows.stop, shown) - s.rows.start) * ROW
        drawn.append(
            DrawnStretch(
                number=s.number,
                x=x,
                y=s.rows.start * ROW,
                width=wide,
                height=high,
                label=f"{len(s):,}" if wide > 9 * len(f"{len(s):,}") and high >= ROW else "",
                title=describe(s, members),
                sampled=tuple((scale.at(a), scale.at(b) - scale.at(a)) for a, b in s.sampled),
                shared=len(s.rollouts),
            )
        )
    ends = tuple((row.rollout, scale.at(len(row)), i * ROW) for i, row in enumerate(trie.rows[:shown]))
    return DrawnTree(WIDTH, shown * ROW, tuple(drawn), ends, scale.ticks(), len(trie.rows) - shown)


def describe(stretch: Stretch, members: int) -> str:
    """A stretch in words."""
    rollouts = len(stretch.rollouts)
    by = (
        f"all {members} rollouts"
        if rollouts == members and members > 1
        else (f"{rollouts} of {members} rollouts")
    )
    return (
        f"tokens {stretch.start:,} to {stretch.end:,} "
        f"({len(stretch):,}, {stretch.sampled_tokens:,} sampled) of {by}"
    )


class _Scale:
    """From depths to pixels."""

    def __init__(self, depths: Sequence[int]) -> None:
        self._depths = depths
        parts = [math.sqrt(b - a) for a, b in pairwise(depths)]
        least = min(_LEAST, WIDTH / (2 * len(parts))) if parts else 0.0
        room = WIDTH - least * len(parts)
        total = sum(parts) or 1.0
        self._places = [0.0] if depths else []
        for part in parts:
            self._places.append(self._places[-1] + least + room * part / total)

    def at(self, depth: int) -> float:
        """Where a depth is; between two known ones in proportion."""
        i = max(0, min(bisect_right(self._depths, depth) - 1, len(self._depths) - 2))
        if len(self._depths) < 2:
            return 0.0
        a, b = self._depths[i], self._depths[i + 1]
        return self._places[i] + (self._places[i + 1] - self._places[i]) * (depth - a) / (b - a)

    def ticks(self) -> tuple[tuple[int, float], ...]:
        """Some depths, far enough from each other to be written."""
        found: list[tuple[int, float]] = []
        for depth, place in zip(self._depths, self._places, strict=True):
            if not found or place - found[-1][1] > 60:
                found.append((depth, place))
        return tuple(found)
