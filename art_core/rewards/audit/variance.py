"""How much of the rewards' variance within groups a property of the members explains.

Invariant: only members that share the property with another member of their group, and say something else
than it, are counted as explained; a property that tells all members apart explains nothing.

``1 - (W / w) / (T / t)``: W and w are the sum of squares and degrees of freedom within members of equal
property, T and t those within groups; 1 where the property decides the reward, about 0 where it is by chance
(adjusted R-squared, Ezekiel 1930).
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

LEAST_FREEDOM = 16
"""Fewer degrees of freedom within members of equal property say nothing."""


@dataclass(frozen=True, slots=True)
class Explained:
    """A share of variance.

    Attributes:
        share: explained, at most 1; can be below 0.
        freedom: degrees of freedom that it rests on.
        between: degrees of freedom of the property itself; 0 where it never varies within a group.
    """

    share: float
    freedom: int
    between: int


def explained(
    groups: Iterable[Sequence[tuple[Hashable, Hashable, float]]], least: int = LEAST_FREEDOM
) -> Explained | None:
    """The share of the rewards' variance that a property explains.

    Args:
        groups: property, contents and reward of each member, by group; members of equal contents are one.
        least: degrees of freedom that are needed.

    Returns:
        The share; None where there is too little to say, or nothing varies.
    """
    within = total = 0.0
    freedom = total_freedom = 0
    for group in groups:
        distinct = {(kind, what): reward for kind, what, reward in group}
        if len(distinct) < 2:
            continue
        cells: dict[Hashable, list[float]] = {}
        for (kind, _), reward in distinct.items():
            cells.setdefault(kind, []).append(reward)
        total += _squares(list(distinct.values()))
        total_freedom += len(distinct) - 1
        within += sum(_squares(cell) for cell in cells.values())
        freedom += sum(len(cell) - 1 for cell in cells.values())
    if freedom < least or total < 1e-12:
        return None
    share = 1 - (within / freedom) / (total / total_freedom)
    return Explained(share, freedom, total_freedom - freedom)


def _squares(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values)
