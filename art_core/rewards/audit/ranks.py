"""Rank correlation within groups, and how likely chance alone gives it.

Invariant: groups are never mixed. Scenarios differ in difficulty and in how long their answers are, and GRPO
compares the members of one group alone; a correlation across groups says nothing about what is learned.

In each group both quantities become centred ranks (ties share the mean rank), divided by the group's size.
Their products are added up over all groups: Spearman's coefficient, stratified. Under the hypothesis that a
group's members could be exchanged, the sum has mean 0 and variance ``sum_g A_g * B_g / (n_g - 1)`` exactly,
``A_g`` and ``B_g`` being the sums of squares (Hoeffding 1951, "A combinatorial central limit theorem"); the
normal approximation gives the p-value, also with ties. The same holds for values in place of ranks.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

LEAST = 24
"""Fewer members than this, in groups where both quantities vary, say nothing."""


@dataclass(frozen=True, slots=True)
class Association:
    """How two quantities go together within groups.

    Attributes:
        rho: rank correlation pooled over groups, -1 to 1.
        p: two-sided probability of one at least as far from 0, if there were none.
        groups: groups in which both vary.
        members: in those groups.
    """

    rho: float
    p: float
    groups: int
    members: int


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value from 1; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    at = 0
    while at < len(order):
        end = at
        while end + 1 < len(order) and values[order[end + 1]] == values[order[at]]:
            end += 1
        for place in order[at : end + 1]:
            found[place] = (at + end) / 2 + 1
        at = end + 1
    return found


def centred(values: Sequence[float]) -> list[float]:
    """Centred ranks divided by how many there are, so that large groups weigh by their members alone."""
    middle = (len(values) + 1) / 2
    return [(rank - middle) / len(values) for rank in ranks(values)]


def _about_mean(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def association(
    groups: Iterable[Sequence[tuple[float, float]]], least: int = LEAST, *, by_value: bool = False
) -> Association | None:
    """How the two quantities of each pair go together within groups.

    Args:
        groups: pairs of values, by group.
        least: members that are needed in groups where both vary.
        by_value: take the second quantity as it is instead of its ranks. Of rewards, that is what trains: a
            group in which they differ by a hair (a small cost of each step, say) counts for a hair.

    Returns:
        The association; None where there is too little to say.
    """
    together = first = second = variance = 0.0
    informative = members = 0
    for group in groups:
        if len(group) < 2:
            continue
        a = centred([x for x, _ in group])
        b = _about_mean([y for _, y in group]) if by_value else centred([y for _, y in group])
        spread_a, spread_b = math.fsum(x * x for x in a), math.fsum(y * y for y in b)
        if spread_a == 0 or spread_b == 0:
            continue
        informative += 1
        members += len(group)
        together += math.fsum(x * y for x, y in zip(a, b, strict=True))
        first += spread_a
        second += spread_b
        variance += spread_a * spread_b / (len(group) - 1)
    if members < least:
        return None
    p = math.erfc(abs(together) / math.sqrt(2 * variance))
    return Association(together / math.sqrt(first * second), p, informative, members)


def concordance(groups: Iterable[Sequence[tuple[float, float]]], equal: float = 0.0) -> float | None:
    """How surely more of the first quantity means more of the second, within groups: Somers' D.

    Of the pairs of members that differ in the first quantity, the share in which the second one differs the
    same way, minus the share in which it differs the other way (Somers 1962). A reward that merely has to do
    with length ties many runs of different lengths; one that is made from length does not.

    Args:
        groups: pairs of values, by group.
        equal: differences of the second quantity up to this are none.

    Returns:
        From -1 to 1; None where no pair differs in the first quantity.
    """
    agree = pairs = 0
    for group in groups:
        for (x, y), (u, v) in combinations(group, 2):
            if x != u:
                pairs += 1
                if abs(y - v) > equal:
                    agree += 1 if (x < u) == (y < v) else -1
    return agree / pairs if pairs else None


def partial(groups: Sequence[Sequence[tuple[float, float, float]]], least: int = LEAST) -> Association | None:
    """How the first two quantities go together where the third is held fixed.

    Spearman's partial coefficient on the pooled ranks (Kendall 1942, "Partial rank correlation"); its
    p-value is that of Fisher's transform.
    """
    kept = [g for g in groups if len(g) > 1 and all(len(set(column)) > 1 for column in zip(*g, strict=True))]
    pairs = [
        association(([(m[i], m[j]) for m in group] for group in kept), least)
        for i, j in ((0, 1), (0, 2), (1, 2))
    ]
    xy, xz, yz = pairs
    if xy is None or xz is None or yz is None:
        return None
    left = (1 - xz.rho**2) * (1 - yz.rho**2)
    if left < 1e-9:  # the third says everything about one of them
        return Association(0.0, 1.0, xy.groups, xy.members)
    rho = (xy.rho - xz.rho * yz.rho) / math.sqrt(left)
    rho = max(-1.0, min(1.0, rho))
    freedom = max(xy.members - xy.groups - 3, 1)
    z = math.atanh(min(abs(rho), 1 - 1e-12)) * math.sqrt(freedom)
    return Association(rho, math.erfc(z / math.sqrt(2)), xy.groups, xy.members)
