"""Rewards of nodes and steps that are not where they belong.

Invariant: a node's reward is about what that node said. A reward under a name that made no call is given to
nobody; one that follows another node's words teaches the wrong one.
"""

from collections import Counter

from art_core.rewards.audit.answers import answered
from art_core.rewards.audit.check import Checked
from art_core.rewards.audit.evidence import Evidence
from art_core.rewards.audit.finding import Finding, Severity, share, to_read
from art_core.rewards.audit.variance import explained
from art_core.rewards.labels import Labels
from art_core.types import Trajectory
from art_core.views.text import content_text

FOLLOWS_OTHER = 0.9
"""Share of a node's reward that another node's words explain, from which it is the other one's."""
OWN = 0.5
"""While its own words explain less than this."""


def rewarded_nodes(evidence: Evidence, labels: Labels | None) -> Checked:
    """Rewards of nodes that made no call, that are not trained, or that earned another one's reward."""
    runs = [t for t in evidence.trajectories if t.node_rewards or t.step_rewards]
    if not runs:
        return Checked(skipped="no rewards of nodes or steps")
    return Checked((*_of_nobody(runs), *_untrained(runs), *_of_others(evidence)))


def said_in(trajectory: Trajectory, node: str | None) -> str:
    """Everything that the models of a node wrote."""
    return "\n".join(content_text(s.response or {}) for s in answered(trajectory) if s.identity.node == node)


def _of_nobody(runs: list[Trajectory]) -> list[Finding]:
    lost: Counter[str] = Counter()
    read: list[str] = []
    for t in runs:
        nodes = {s.identity.node for s in answered(t)}
        ids = {s.id for s in t.steps}
        missing = {f"node {n!r}" for n in t.node_rewards if n not in nodes}
        if any(s not in ids for s in t.step_rewards):
            missing.add("a step that is not there")
        if missing:
            lost.update(missing)
            read.append(t.id)
    if not lost or len(read) <= 0.1 * len(runs):
        # A node that some runs skip may be rewarded for that now and then.
        return []
    name, count = lost.most_common(1)[0]
    known = sorted({s.identity.node for t in runs for s in answered(t) if s.identity.node})
    return [
        Finding(
            name="reward_of_nobody",
            severity=Severity.CRITICAL,
            message=f"in {share(count, len(runs))} runs {name} has a reward and made no call: nobody is "
            "trained by it",
            fix="use the names of nodes that call a model: "
            f"{', '.join(map(repr, known)) or 'there are none'}",
            trajectories=to_read(read),
            figures={"runs": count},
        )
    ]


def _untrained(runs: list[Trajectory]) -> list[Finding]:
    trained = {s.identity.node for t in runs for s in t.steps if s.trainable}
    rewarded = Counter(
        n for t in runs for n in t.node_rewards if any(s.identity.node == n for s in answered(t))
    )
    if not trained:  # nothing of these runs is trained: they are from elsewhere
        return []
    idle = {node: count for node, count in rewarded.items() if node not in trained}
    if not idle or set(rewarded) - set(idle):
        # Beside rewards that do train, one for a frozen node may be there to be read.
        return []
    node, count = max(idle.items(), key=lambda entry: entry[1])
    return [
        Finding(
            name="reward_of_untrained_node",
            severity=Severity.CRITICAL,
            message=f"rewards are given to node {node!r} (in {share(count, len(runs))} runs), none of whose "
            f"calls can be trained; the nodes that are trained: {', '.join(sorted(map(str, trained)))}",
            fix="reward a node whose model is the policy, or let that node call it",
            trajectories=to_read(t.id for t in runs if node in t.node_rewards),
            figures={"runs": count},
        )
    ]


def _of_others(evidence: Evidence) -> list[Finding]:
    """Node rewards that stay when another node says the same, and not when their own does."""
    findings: list[Finding] = []
    groups = [[t for t in group if t.node_rewards] for group in evidence.groups]
    rewarded = sorted({node for g in groups for t in g for node in t.node_rewards})
    talking = sorted({s.identity.node for g in groups for t in g for s in answered(t) if s.identity.node})
    for node in rewarded:
        if node not in talking:
            continue
        having = [[t for t in g if node in t.node_rewards] for g in groups]

        def by(which: str, having: list[list[Trajectory]] = having, node: str = node) -> float | None:
            found = explained(
                [(said_in(t, which), t.id, t.node_rewards[node]) for t in members] for members in having
            )
            return None if found is None or not found.between else found.share

        own = by(node)
        if own is not None and own >= OWN:
            continue
        others = {other: part for other in talking if other != node and (part := by(other)) is not None}
        if not others or own is None:
            continue
        other = max(others, key=lambda name: others[name])
        if others[other] >= FOLLOWS_OTHER:
            findings.append(
                other_node(node, other, to_read(t.id for g in having for t in g), own, others[other])
            )
    return findings


def other_node(node: str, other: str, read: tuple[str, ...], own: float, others: float) -> Finding:
    """A node's reward that is another node's.

    Args:
        node: who has the reward.
        other: whose words decide it.
        read: trajectories to read.
        own: how much of it the node's own words decide, at most 1.
        others: how much the other's decide.
    """
    return Finding(
        name="reward_of_other_node",
        severity=Severity.CRITICAL,
        message=f"the reward of node {node!r} is decided by what {other!r} says ({others:.0%}), not by its "
        f"own words ({max(own, 0):.0%}): {node!r} is trained on what it did not do",
        fix=f"give the reward to {other!r}, or read {node!r}'s messages in the function (PerNode does)",
        trajectories=read,
        figures={"own": own, "other": others},
    )
