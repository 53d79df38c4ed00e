"""Whether the reward says what people say.

Invariant: only runs of one group are compared, as people and GRPO compare them; a pair on which people have
no preference says nothing.
"""

import math
from itertools import combinations

from art_core.rewards.audit.check import Checked
from art_core.rewards.audit.evidence import Evidence, reward_of
from art_core.rewards.audit.finding import Finding, Severity, to_read
from art_core.rewards.audit.ranks import association
from art_core.rewards.labels import Labels
from art_core.types import Trajectory

LEAST_PAIRS = 12
"""Fewer labelled pairs say nothing."""
GOOD = 0.7
"""Pairwise accuracy that a reward should have. People agree with each other on about 73% of pairs of answers
(Ouyang et al. 2022, arXiv:2203.02155, section 3.4)."""
SURE = 1.96
"""Standard errors of the interval that has to lie on one side."""


def people(evidence: Evidence, labels: Labels | None) -> Checked:
    """Spearman's correlation and pairwise accuracy against people's labels."""
    if labels is None or not (labels.scores or labels.preferences):
        return Checked(skipped="no labels of people; thumbs, scores and choices make some (see feedback)")
    pairs = _pairs(evidence, labels)
    if len(pairs) < LEAST_PAIRS:
        return Checked(
            skipped=f"{len(pairs)} pairs of runs of one group that people tell apart; {LEAST_PAIRS} are "
            "needed",
            figures={"pairs": len(pairs)},
        )
    accuracy = math.fsum(right for _, _, right in pairs) / len(pairs)
    low, high = _interval(accuracy, len(pairs))
    figures = {
        "pairs": float(len(pairs)),
        "pairwise_accuracy": accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
    }
    scored = [
        [(labels.scores[t.id], reward_of(t)) for t in members if t.id in labels.scores]
        for members in evidence.scored
    ]
    if (found := association(scored, LEAST_PAIRS)) is not None:
        figures["spearman"] = found.rho
    if high >= GOOD:
        return Checked(figures=figures)
    against = high < 0.5
    wrong = [better.id for better, _, right in pairs if right == 0] + [
        w.id for _, w, right in pairs if right == 0
    ]
    finding = Finding(
        name="disagrees_with_people",
        severity=Severity.CRITICAL if low < 0.5 else Severity.WARNING,
        message=f"the reward prefers what people prefer in {accuracy:.0%} of {len(pairs)} pairs (95% "
        f"interval {low:.0%} to {high:.0%}){': it points the other way' if against else ''}",
        fix="a sign is wrong in the reward: look at its components' weights"
        if against
        else "read pairs that it gets wrong, and change the rubric or the weights until it gets them right",
        trajectories=to_read(wrong),
        figures=figures,
    )
    return Checked((finding,), figures)


def _pairs(evidence: Evidence, labels: Labels) -> list[tuple[Trajectory, Trajectory, float]]:
    """Better and worse by people, and 1, 0 or (equal rewards) 0.5 for whether the reward agrees."""
    found: list[tuple[Trajectory, Trajectory, float]] = []
    for members in evidence.scored:
        by_id = {t.id: t for t in members}
        chosen = [
            (by_id[p.better], by_id[p.worse])
            for p in labels.preferences
            if not p.tie and p.better in by_id and p.worse in by_id
        ]
        told = [t for t in members if t.id in labels.scores]
        for one, other in combinations(told, 2):
            a, b = labels.scores[one.id], labels.scores[other.id]
            if a != b:
                chosen.append((one, other) if a > b else (other, one))
        for better, worse in chosen:
            x, y = reward_of(better), reward_of(worse)
            found.append((better, worse, 0.5 if x == y else float(x > y)))
    return found


def _interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927)."""
    z2 = SURE**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = SURE / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return middle - half, middle + half
