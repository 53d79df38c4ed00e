"""One scale for scores that were given in several overlapping sets.

Invariant: every item is in some set, sets hang together by items that they share, and the scale depends on
the scores alone. Within the range of one set, no order is changed that all sets agree on.

A judge that compares is strict in a strong set and kind in a weak one, and may spread a narrow set out. So
each set j has its own offset and stretch: ``a_j * score_ij + b_j`` estimates item i. Both are found by
alternating least squares over the shared items, drawn to ``a = 1, b = 0`` as far as those say little.
"""

import random
from collections.abc import Mapping, Sequence

_ROUNDS = 200
_PULL = 0.005
"""Weight of "this set is like any other", against one per item of the set. Less is better for a judge without
noise that stretches, more for a noisy one that does not (``benchmarks/ruler.py``)."""


def overlapping_sets(items: int, size: int, rng: random.Random) -> list[list[int]]:
    """Split items into sets of at most ``size``, around a circle, each sharing half with the next.

    Args:
        items: how many there are.
        size: of the largest set, at least 2.
        rng: decides who is with whom.
    """
    order = list(range(items))
    rng.shuffle(order)
    if items <= size:
        return [order]
    stride = max(size // 2, 1)
    return [[order[(at + i) % items] for i in range(size)] for at in range(0, items, stride)]


def one_scale(sets: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The items' scores from 0 to 1 on one scale.

    Args:
        sets: item to score, for each set; scores from 0 to 1.
    """
    if len(sets) == 1:
        return dict(sets[0])
    stretch = [1.0] * len(sets)
    offset = [0.0] * len(sets)
    scores = _means(sets, stretch, offset)
    for _ in range(_ROUNDS):
        for j, given in enumerate(sets):
            stretch[j], offset[j] = _line([(x, scores[i]) for i, x in given.items()])
        # Without this, one constant for all items would fit best.
        mean = sum(stretch) / len(sets)
        stretch = [a / mean for a in stretch]
        shift = sum(offset) / len(sets)
        offset = [b - shift for b in offset]
        scores = _means(sets, stretch, offset)
    low, high = min(0.0, *scores.values()), max(1.0, *scores.values())
    return {i: (score - low) / (high - low) for i, score in scores.items()}


def _means(
    sets: Sequence[Mapping[int, float]], stretch: Sequence[float], offset: Sequence[float]
) -> dict[int, float]:
    told: dict[int, list[float]] = {}
    for given, a, b in zip(sets, stretch, offset, strict=True):
        for i, x in given.items():
            told.setdefault(i, []).append(a * x + b)
    return {i: sum(values) / len(values) for i, values in told.items()}


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of least squares with a prior of slope 1; a slope never below 0.2."""
    count = len(points)
    x = sum(p[0] for p in points) / count
    y = sum(p[1] for p in points) / count
    spread = sum((p[0] - x) ** 2 for p in points)
    together = sum((p[0] - x) * (p[1] - y) for p in points)
    pull = _PULL * count
    slope = max((together + pull) / (spread + pull), 0.2)
    return slope, y - slope * x
