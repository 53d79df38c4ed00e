"""Whether the parts of a reward pull where they should, and whether one drowns the others.

Invariant: a part counts with the weight that was recorded beside it, so what is compared is what it did to
the reward, never its raw value alone.
"""

import math
from collections.abc import Mapping
from itertools import combinations

from art_core.rewards.audit.check import Checked
from art_core.rewards.audit.evidence import Evidence, reward_of
from art_core.rewards.audit.finding import Finding, Severity, to_read
from art_core.rewards.audit.ranks import association
from art_core.rewards.labels import Labels
from art_core.rewards.sums import component_weights

DIRECTIONS: Mapping[str, int] = {
    "exact_match": 1,
    "fuzzy_match": 1,
    "format": 1,
    "valid_json": 1,
    "valid_tool_calls": 1,
    "citation": 1,
    "grounding": 1,
    "tool_choice": 1,
    "tool_arguments": 1,
    "efficiency": 1,
    "relevance": 1,
    "user_feedback": 1,
    "ruler": 1,
    "forbidden": -1,
    "refusal": -1,
    "tool_errors": -1,
    "steps": -1,
    "length": -1,
    "latency": -1,
    "cost": -1,
}
"""Which way the ready-made components point: 1 where more is better."""

OPPOSED = -0.6
"""Rank correlation of two parts' contributions from which they work against each other."""
CHANCE = 1e-3
DOMINATES = 0.9
"""Share of the reward's variance from which one part is all that counts."""
OTHER_SCALE = 5.0
"""A part whose raw values spread this many times wider than any other's is on another scale."""


def signs(evidence: Evidence, labels: Labels | None) -> Checked:
    """Ready-made components that are weighted the wrong way round."""
    weights = _signed(evidence)
    if not weights:
        return Checked(skipped="the rewards have no weighted components")
    findings: list[Finding] = []
    for name, weight in weights.items():
        direction = DIRECTIONS.get(name)
        if direction is None or weight * direction >= 0:
            continue
        having = [t for members in evidence.scored for t in members if t.components.get(name)]
        if not having:
            continue
        better = "less" if direction < 0 else "more"
        findings.append(
            Finding(
                name="wrong_sign",
                severity=Severity.CRITICAL,
                message=f"component {name!r} has the weight {weight:g}, but {better} of it is better: the "
                f"policy is paid for {'more' if direction < 0 else 'less'} of it",
                fix=f"turn the sign of {name!r} round; if it is meant so, give it a name of its own with "
                "named()",
                trajectories=to_read(
                    t.id for t in sorted(having, key=lambda t: weight * t.components[name], reverse=True)
                ),
                figures={"weight": weight},
            )
        )
    return Checked(tuple(findings))


def agreement(evidence: Evidence, labels: Labels | None) -> Checked:
    """Components that work against each other."""
    weights = _signed(evidence)
    if len(weights) < 2:
        return Checked(skipped="the rewards have no two weighted components")
    findings: list[Finding] = []
    figures: dict[str, float] = {}
    for one, other in combinations(sorted(weights), 2):
        found = association(
            [
                (weights[one] * t.components[one], weights[other] * t.components[other])
                for t in members
                if one in t.components and other in t.components
            ]
            for members in evidence.scored
        )
        if found is None:
            continue
        figures[f"rho_{one}_{other}"] = found.rho
        # What costs is meant to pull against what is wanted.
        costs = any(DIRECTIONS.get(name, 1) < 0 and weights[name] < 0 for name in (one, other))
        if found.rho > OPPOSED or found.p > CHANCE or costs:
            continue
        apart = sorted(
            (
                t
                for members in evidence.scored
                for t in members
                if one in t.components and other in t.components
            ),
            key=lambda t: -abs(weights[one] * t.components[one] - weights[other] * t.components[other]),
        )
        findings.append(
            Finding(
                name="components_disagree",
                severity=Severity.WARNING,
                message=f"what {one!r} (weight {weights[one]:g}) adds to the reward, {other!r} (weight "
                f"{weights[other]:g}) takes away: rank correlation {found.rho:+.2f} within groups over "
                f"{found.members} runs",
                fix="one of the two has the wrong sign, or they measure opposite things: read the runs in "
                "which they differ most, and turn the wrong one round or leave it out",
                trajectories=to_read(t.id for t in apart),
                figures={"rho": found.rho, "p": found.p},
            )
        )
    return Checked(tuple(findings), figures)


def scales(evidence: Evidence, labels: Labels | None) -> Checked:
    """A component whose scale is another than the others', so that only it counts."""
    weights = _signed(evidence)
    if len(weights) < 2:
        return Checked(skipped="the rewards have no two weighted components")
    squares = dict.fromkeys(weights, 0.0)
    shared = dict.fromkeys(weights, 0.0)
    total = 0.0
    for members in evidence.scored:
        whole = [t for t in members if all(name in t.components for name in weights)]
        if len(whole) < 2:
            continue
        rewards = _centred([reward_of(t) for t in whole])
        total += math.fsum(r * r for r in rewards)
        for name in weights:
            raw = _centred([t.components[name] for t in whole])
            squares[name] += math.fsum(x * x for x in raw)
            shared[name] += weights[name] * math.fsum(x * r for x, r in zip(raw, rewards, strict=True))
    if total < 1e-12:
        return Checked(skipped="rewards do not vary within groups")
    shares = {name: value / total for name, value in shared.items()}
    figures = {f"share_{name}": value for name, value in shares.items()}
    loudest = max(shares, key=lambda name: shares[name])
    rest = max((squares[name] for name in weights if name != loudest), default=0.0)
    if shares[loudest] < DOMINATES or rest == 0 or squares[loudest] < OTHER_SCALE**2 * rest:
        return Checked(figures=figures)
    wider = math.sqrt(squares[loudest] / rest)
    finding = Finding(
        name="wrong_scale",
        severity=Severity.CRITICAL,
        message=f"component {loudest!r} makes {shares[loudest]:.0%} of the reward's variance within groups; "
        f"its raw values spread {wider:.0f} times wider than any other component's",
        fix=f"bring {loudest!r} to the others' scale (divide it, or use Efficiency or Adaptive), or lower "
        f"its weight {weights[loudest]:g}",
        trajectories=to_read(t.id for t in evidence.best()),
        figures={"share": shares[loudest], "wider": wider},
    )
    return Checked((finding,), figures)


def _signed(evidence: Evidence) -> dict[str, float]:
    """The weight of each component that varies within some group, as most runs have it."""
    sums: dict[str, list[float]] = {}
    varying: set[str] = set()
    for members in evidence.scored:
        seen: dict[str, set[float]] = {}
        for t in members:
            for name, weight in component_weights(t).items():
                sums.setdefault(name, []).append(weight)
                seen.setdefault(name, set()).add(t.components[name])
        varying |= {name for name, values in seen.items() if len(values) > 1}
    return {name: math.fsum(w) / len(w) for name, w in sums.items() if name in varying}


def _centred(values: list[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]
