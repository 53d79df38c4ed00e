"""Whether recorded scores are of the content that they stand beside.

Invariant: what was judged is compared as text, so a verdict that is found under two different contents was
not made by reading both.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from itertools import combinations
from typing import Any, cast

from art_core.rewards.audit.check import Checked
from art_core.rewards.audit.contents import contents
from art_core.rewards.audit.evidence import Evidence, reward_of
from art_core.rewards.audit.finding import Finding, Severity, share, to_read
from art_core.rewards.judgement import COMPONENT
from art_core.rewards.labels import Labels
from art_core.types import Trajectory

SAID = 20
"""Characters from which a judge's reason is about one run."""
CHANCE = 1e-3
"""Groups that chance alone would give the same rewards, of which there may be so many."""
EQUAL_PAIRS = 8
"""Pairs of equal runs that are needed."""
UNEQUAL = 0.2
"""Share of them whose rewards may differ: an environment may answer the same words differently."""
APART = 0.1
"""Rewards are different from this share of their range on."""


def repeated(evidence: Evidence, labels: Labels | None) -> Checked:
    """Groups of different contents that have, member by member, the same verdicts."""
    seen: dict[Hashable, list[tuple[Trajectory, ...]]] = {}
    telling = 0
    equal = _equal_by_chance(evidence)
    for members in evidence.scored:
        verdicts = tuple(sorted(_verdict(t) for t in members))
        reasons = {reason for _, reason in verdicts if len(reason) >= SAID}
        by_chance = math.comb(len(evidence.scored), 2) * math.factorial(len(members)) * equal ** len(members)
        if len(reasons) < 2 and by_chance > CHANCE:
            continue
        telling += 1
        seen.setdefault(verdicts, []).append(members)
    if telling < 2:
        return Checked(skipped="no two groups whose verdicts tell them apart")
    stale: list[tuple[Trajectory, ...]] = []
    for same in seen.values():
        if len({tuple(sorted(contents(t) for t in members)) for members in same}) > 1:
            stale += same
    figures = {"groups_with_verdicts_of_others": len(stale) / telling}
    if not stale:
        return Checked(figures=figures)
    finding = Finding(
        name="stale_verdicts",
        severity=Severity.CRITICAL,
        message=f"{share(len(stale), telling)} groups share all their scores and reasons with a group of "
        "other content: they were judged by what somebody else did",
        fix="a cache's key must hold all that was judged, the rubric and the judge's name (VerdictCache "
        "does that); throw the cache away and score again",
        trajectories=to_read(members[0].id for members in stale),
        figures=figures,
    )
    return Checked((finding,), figures)


def equal_runs(evidence: Evidence, labels: Labels | None) -> Checked:
    """Members that did the same and have different rewards."""
    if not evidence.rewards:
        return Checked(skipped="no scored runs")
    apart = APART * (max(evidence.rewards) - min(evidence.rewards))
    pairs = 0
    unequal: list[Trajectory] = []
    for members in evidence.scored:
        text = {t.id: contents(t) for t in members}
        for one, other in combinations(members, 2):
            if text[one.id] == text[other.id]:
                pairs += 1
                if abs(reward_of(one) - reward_of(other)) > max(apart, 1e-9):
                    unequal += (one, other)
    if pairs < EQUAL_PAIRS:
        return Checked(skipped=f"{pairs} pairs of equal runs; {EQUAL_PAIRS} are needed")
    figures = {"unequal": len(unequal) / 2 / pairs, "pairs": float(pairs)}
    if figures["unequal"] <= UNEQUAL:
        return Checked(figures=figures)
    finding = Finding(
        name="unequal_for_equal",
        severity=Severity.WARNING,
        message=f"of {pairs} pairs of members that did the same, {figures['unequal']:.0%} have different "
        "rewards",
        fix="if no environment decided them, the reward is noisy, or remembers something else than the "
        "content: judge with more votes, and look at its cache",
        trajectories=to_read(t.id for t in unequal),
        figures=figures,
    )
    return Checked((finding,), figures)


def recorded_score(trajectory: Trajectory) -> float | None:
    """The score that RULER gave; None where it gave none."""
    told = trajectory.metadata.get(COMPONENT)
    score = cast("Mapping[str, Any]", told).get("score") if isinstance(told, Mapping) else None
    return float(score) if isinstance(score, int | float) else trajectory.components.get(COMPONENT)


def _verdict(trajectory: Trajectory) -> tuple[float, str]:
    score = recorded_score(trajectory)
    told = trajectory.metadata.get(COMPONENT)
    reason = cast("Mapping[str, Any]", told).get("explanation") if isinstance(told, Mapping) else None
    return reward_of(trajectory) if score is None else score, reason if isinstance(reason, str) else ""


def _equal_by_chance(evidence: Evidence) -> float:
    """How often two rewards are equal, of all pairs of them."""
    count = len(evidence.rewards)
    same = sum(math.comb(times, 2) for times in Counter(evidence.rewards).values())
    return same / math.comb(count, 2) if count > 1 else 1.0
