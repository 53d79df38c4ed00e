"""Whose words a node's reward follows: words are put into another run, and the reward is asked again.

Invariant: of two members of a group only one node's words are exchanged at a time, so what changes the reward
is known.
"""

import random
from dataclasses import replace
from statistics import fmean

from art_core.rewards.audit.answers import answered
from art_core.rewards.audit.asking import Asked, Asker
from art_core.rewards.audit.check import Checked
from art_core.rewards.audit.evidence import Evidence
from art_core.rewards.audit.finding import Finding, to_read
from art_core.rewards.audit.nodes import other_node
from art_core.types import Trajectory

LEAST = 4
"""Pairs of members in which a node's reward differs that are needed."""
OWN = 0.2
"""A node's words that move its reward by less than this share do not decide it."""
OTHERS = 0.8
"""Another node's words that move it by this share do."""


async def transplant(evidence: Evidence, asker: Asker, groups: int, seed: int) -> Checked:
    """Node rewards that do not follow their own node's words.

    Args:
        evidence: where runs are taken from.
        asker: asks the function.
        groups: from at most so many groups.
        seed: decides which.
    """
    rng = random.Random(seed)
    having = [g for g in evidence.scored if len({s.identity.node for t in g for s in answered(t)}) > 1]
    chosen = rng.sample(having, min(groups, len(having)))
    asked = [await asker.ask(members) for members in chosen]
    nodes = sorted({n for g in asked for a in g if a.reward is not None for n in a.reward.by_node})
    if not nodes:
        return Checked(skipped="the function rewards no nodes of runs with several")
    findings: list[Finding] = []
    figures: dict[str, float] = {}
    for node in nodes:
        pairs = [pair for g in asked if (pair := _differing(g, node)) is not None]
        if len(pairs) < LEAST:
            continue
        talking = sorted(
            {s.identity.node for a, _ in pairs for s in answered(a.trajectory) if s.identity.node}
        )
        moved = {whose: await _moved(pairs, node, whose, asker) for whose in talking}
        known = {whose: value for whose, value in moved.items() if value is not None}
        figures |= {f"{node}_by_{whose}": value for whose, value in known.items()}
        others = {whose: value for whose, value in known.items() if whose != node}
        if not others or known.get(node, 0.0) >= OWN:
            continue
        other = max(others, key=lambda whose: others[whose])
        if others[other] >= OTHERS:
            read = to_read(a.trajectory.id for a, _ in pairs)
            findings.append(other_node(node, other, read, known.get(node, 0.0), min(others[other], 1.0)))
    return Checked(tuple(findings), figures)


def _differing(asked: list[Asked], node: str) -> tuple[Asked, Asked] | None:
    """The two members whose node differs most in its reward."""
    having = [a for a in asked if a.reward is not None and node in a.reward.by_node]
    having.sort(key=lambda a: _reward(a, node))
    if len(having) < 2 or _reward(having[-1], node) - _reward(having[0], node) < 1e-6:
        return None
    return having[0], having[-1]


async def _moved(pairs: list[tuple[Asked, Asked]], node: str, whose: str, asker: Asker) -> float | None:
    """The share of the way to the other's reward that somebody's words move a node's reward."""
    changed = [
        (a, b, run) for a, b in pairs if (run := _exchanged(a.trajectory, b.trajectory, whose)) is not None
    ]
    said = await asker.ask([run for _, _, run in changed])
    shares = [
        (now.reward.by_node[node] - _reward(a, node)) / (_reward(b, node) - _reward(a, node))
        for (a, b, _), now in zip(changed, said, strict=True)
        if now.reward is not None and node in now.reward.by_node
    ]
    return fmean(max(-1.0, min(1.0, s)) for s in shares) if len(shares) >= LEAST else None


def _exchanged(run: Trajectory, donor: Trajectory, node: str) -> Trajectory | None:
    """A run in which a node said what it said in another; None where the two called it differently often."""
    said = [s.response for s in answered(donor) if s.identity.node == node]
    own = [s for s in answered(run) if s.identity.node == node]
    if len(said) != len(own) or not said:
        return None
    new = {step.id: response for step, response in zip(own, said, strict=True)}
    steps = tuple(replace(s, response=new[s.id]) if s.id in new else s for s in run.steps)
    metadata = dict(run.metadata)
    output = donor.metadata.get("output")
    if isinstance(output, str) and run.steps and answered(run)[-1].id in new:
        metadata["output"] = output
    return replace(run, steps=steps, metadata=metadata)


def _reward(asked: Asked, node: str) -> float:
    assert asked.reward is not None
    return asked.reward.by_node[node]
