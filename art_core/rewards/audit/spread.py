"""Whether rewards differ where they have to: within groups, and below their highest value.

Invariant: what counts is what GRPO learns from. A group whose rewards are equal (up to float noise) teaches
nothing, whatever other groups are worth.
"""

from art_core.rewards.audit.check import Checked
from art_core.rewards.audit.contents import contents
from art_core.rewards.audit.evidence import Evidence, reward_of
from art_core.rewards.audit.finding import Finding, Severity, share, to_read
from art_core.rewards.labels import Labels

NO_SPREAD = 1e-6
"""Rewards that differ by no more are equal, as in training (`art_core.training.advantages`)."""
LEAST_GROUPS = 3
"""Fewer groups are a coincidence."""
MANY_FLAT = 0.6
"""Share of groups that teach nothing above which most of the sampling is for nothing."""
MANY_AT_TOP = 0.8
"""Share of rewards at their highest value above which the scale is used up."""
NEAR = 0.02
"""At the highest value is what lies within this share of the whole range from it."""


def spread(evidence: Evidence, labels: Labels | None) -> Checked:
    """Groups without any difference between their members."""
    groups = evidence.scored
    if len(groups) < LEAST_GROUPS:
        return Checked(skipped=f"{len(groups)} groups with two scored members; {LEAST_GROUPS} are needed")
    flat = [g for g in groups if max(map(reward_of, g)) - min(map(reward_of, g)) <= NO_SPREAD]
    same = [g for g in flat if len({contents(t) for t in g}) == 1]
    figures = {"groups": float(len(groups)), "groups_without_spread": len(flat) / len(groups)}
    if len(flat) / len(groups) <= MANY_FLAT:
        return Checked(figures=figures)
    read = to_read(t.id for g in flat for t in g[:1])
    if max(evidence.rewards) - min(evidence.rewards) <= NO_SPREAD:
        finding = Finding(
            name="constant",
            severity=Severity.CRITICAL,
            message=f"all {len(evidence.rewards)} rewards are {evidence.rewards[0]:g}: nothing can be "
            "learned",
            fix="give a reward that depends on what the agent did; look whether the function reads the "
            "right field, and whether something in it fails and falls back to a default",
            trajectories=read,
            figures=figures,
        )
        return Checked((finding,), figures)
    if len(same) * 2 > len(flat):
        fix = (
            "members of most of these groups did the same thing: sample at a higher temperature, or take "
            "scenarios that leave room for other answers; the reward is not to blame"
        )
    else:
        fix = (
            "the members did different things and were worth the same: make the reward finer (parts of the "
            "goal, a judge that compares: Ruler), or take scenarios of another difficulty"
        )
    finding = Finding(
        name="no_spread",
        severity=Severity.WARNING,
        message=f"{share(len(flat), len(groups))} groups have no two rewards that differ, so their rollouts "
        f"teach nothing; in {len(same)} of them all members said the same",
        fix=fix,
        trajectories=read,
        figures=figures,
    )
    return Checked((finding,), figures)


def saturation(evidence: Evidence, labels: Labels | None) -> Checked:
    """Rewards that have reached the end of their scale."""
    rewards = evidence.rewards
    groups = len(evidence.scored)
    if groups < LEAST_GROUPS:
        return Checked(skipped=f"{groups} groups with two scored members; {LEAST_GROUPS} are needed")
    low, high = min(rewards), max(rewards)
    if high - low <= NO_SPREAD:
        return Checked(skipped="all rewards are equal")
    room = NEAR * (high - low)
    top = sum(r >= high - room for r in rewards) / len(rewards)
    bottom = sum(r <= low + room for r in rewards) / len(rewards)
    figures = {"at_highest": top, "at_lowest": bottom}
    # Where most are at the lowest value the others still teach, and `spread` says when too few groups do.
    if top <= MANY_AT_TOP:
        return Checked(figures=figures)
    odd = [t for g in evidence.scored for t in g if reward_of(t) < high - room]
    finding = Finding(
        name="saturated",
        severity=Severity.WARNING,
        message=f"{top:.0%} of {len(rewards)} rewards are at the highest value, {high:g}: what is better "
        "still is worth no more",
        fix="if those runs are as good as can be, take harder scenarios; if not, stretch the scale (count "
        "parts of the goal, compare members with Ruler)",
        trajectories=to_read(t.id for t in odd),
        figures=figures,
    )
    return Checked((finding,), figures)
