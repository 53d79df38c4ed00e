"""Failures that look like scores, and scores that could not be given.

Invariant: a run that broke tells nothing about what the policy did; wherever its reward took part in a
group's mean, the finding says so.
"""

from collections import Counter

from art_core.rewards.audit.answers import answered
from art_core.rewards.audit.check import Checked
from art_core.rewards.audit.evidence import Evidence, reward_of
from art_core.rewards.audit.finding import Finding, Severity, share, to_read
from art_core.rewards.labels import Labels
from art_core.types import Trajectory

LEAST = 2
"""One broken run with a reward may be what its user wants."""
ALIKE = 0.9
"""Share of the broken runs that have the same reward, from which it is a default and no score."""
OFTEN = 0.02
"""Share of runs that a reward may fail on."""


def scored_failures(evidence: Evidence, labels: Labels | None) -> Checked:
    """Runs that broke, and have a reward like a bad answer's."""
    broken = {t.id: why for members in evidence.scored for t in members if (why := broken_by(t))}
    scored = [t for members in evidence.scored for t in members]
    if not scored:
        return Checked(skipped="no scored runs")
    figures = {"broken_and_scored": len(broken) / len(scored)}
    if len(broken) < LEAST:
        return Checked(figures=figures)
    values = Counter(round(reward_of(t), 9) for t in scored if t.id in broken)
    value, count = values.most_common(1)[0]
    lowest = min(evidence.rewards)
    if count < ALIKE * len(broken) or value > lowest + 0.1 * (max(evidence.rewards) - lowest):
        return Checked(figures=figures)
    why = next(iter(broken.values()))
    finding = Finding(
        name="failures_scored",
        severity=Severity.CRITICAL,
        message=f"{share(len(broken), len(scored))} scored runs broke ({why}) and have the reward "
        f"{value:g}, like the worst answers: the policy is punished for what the environment did",
        fix="let such rollouts fail: raise in the agent or in the reward function instead of returning "
        f"{value:g}; a failed rollout takes no part in its group",
        trajectories=to_read(broken),
        figures={"broken": len(broken), "reward": value},
    )
    return Checked((finding,), figures)


def broken_by(trajectory: Trajectory) -> str | None:
    """What a run that ended without an answer was broken by; None for one that ended well."""
    for key in ("error", "exception"):
        if (said := trajectory.metadata.get(key)) and isinstance(said, str):
            return said[:80]
    if trajectory.steps:
        last = trajectory.steps[-1]
        if last.error is not None and not any(
            s.response is not None and s.started_at >= last.started_at for s in answered(trajectory)
        ):
            return last.error[:80]
    roots = [span for span in trajectory.spans if span.parent_id is None]
    return next(((s.error or s.status)[:80] for s in roots if s.status in ("error", "cancelled")), None)


def failing_reward(evidence: Evidence, labels: Labels | None) -> Checked:
    """Runs that a reward function or judge could not score."""
    runs = evidence.trajectories
    if not runs:
        return Checked(skipped="no runs")
    figures: dict[str, float] = {}
    findings: list[Finding] = []
    for cause, name, fix in (
        (
            "reward",
            "reward_fails",
            "make the function hold for such runs (guard divisions, logarithms and parsing), and check its "
            "result; a NaN is no score, and neither is a zero in its place",
        ),
        (
            "judge",
            "judge_fails",
            "look at the judge's answers: give it a larger context or timeout, or a model that keeps to JSON",
        ),
    ):
        failed = [t for t in runs if t.failed and t.failure is not None and t.failure.cause == cause]
        figures[f"failed_by_{cause}"] = len(failed) / len(runs)
        if not failed or (cause == "judge" and len(failed) <= OFTEN * len(runs)):
            continue
        said = Counter(t.failure.message for t in failed if t.failure is not None).most_common(1)[0][0]
        findings.append(
            Finding(
                name=name,
                severity=Severity.CRITICAL if len(failed) > OFTEN * len(runs) else Severity.WARNING,
                message=f"{share(len(failed), len(runs))} runs ended well and could not be scored; most "
                f"often: {said[:200]}",
                fix=fix,
                trajectories=to_read(t.id for t in failed),
                figures={"failed": len(failed), "runs": len(runs)},
            )
        )
    return Checked(tuple(findings), figures)
