"""Asking a judge again: in another order, in the same order, and beside what it once said.

Invariant: nothing comes from the cache, and nothing goes there; each group is asked about in the same few
orders, so that every member stands early and late, and is compared with itself.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from statistics import fmean

from art_core.rewards.audit.check import Checked
from art_core.rewards.audit.contents import contents
from art_core.rewards.audit.evidence import Evidence
from art_core.rewards.audit.finding import Finding, Severity, to_read
from art_core.rewards.audit.ranks import Association, association
from art_core.rewards.audit.verdicts import recorded_score
from art_core.rewards.judge import JudgeError
from art_core.rewards.ruler import Ruler
from art_core.types import TrajectoryGroup

LEAST_GROUPS = 3
STEADY = 0.6
"""Rank agreement of a judge with itself below which its scores are mostly noise."""
PLACE = 0.1
"""Score that going from first to last place may cost."""
CHANCE = 1e-2
STALE = 0.3
"""Rank agreement of recorded and new scores below which they are of something else."""
FAILING = 0.1
"""Share of questions that a judge may fail to answer."""


@dataclass(frozen=True, slots=True)
class _Group:
    """One group's scores by member, for each order that it was asked in; the first two are the same."""

    group: TrajectoryGroup
    orders: tuple[tuple[int, ...], ...]
    said: tuple[dict[str, float] | None, ...]
    errors: tuple[str, ...]


async def judge_again(evidence: Evidence, ruler: Ruler, groups: int, seed: int) -> dict[str, Checked]:
    """How steady, fair and up to date a judge's scores are.

    Args:
        evidence: where groups are taken from.
        ruler: whose judge and rubric are asked; four calls for each group.
        groups: at most so many.
        seed: decides which, and the orders.

    Returns:
        What came of each check, by its name.
    """
    rng = random.Random(seed)
    fit = [members for group in evidence.groups if len(members := _distinct(group)) > 2]
    chosen = rng.sample(fit, min(groups, len(fit)))
    if len(chosen) < LEAST_GROUPS:
        why = f"{len(chosen)} groups with three members that did different things; {LEAST_GROUPS} are needed"
        return {
            name: Checked(skipped=why)
            for name in ("judge_answers", "judge_steady", "judge_place", "judge_now")
        }
    asked = await asyncio.gather(*(_ask(members, ruler, rng.random()) for members in chosen))
    return {
        "judge_answers": _answers(asked),
        "judge_steady": _steady(asked),
        "judge_place": _place(asked),
        "judge_now": _now(asked),
    }


def _distinct(group: TrajectoryGroup) -> TrajectoryGroup:
    found = {contents(t): t for t in group if not t.failed and t.steps}
    return group.with_trajectories(list(found.values()))


async def _ask(group: TrajectoryGroup, ruler: Ruler, seed: float) -> _Group:
    count = len(group)
    order = list(range(count))
    random.Random(seed).shuffle(order)
    half = (count + 1) // 2
    orders = tuple(map(tuple, (order, order, order[::-1], [*order[half:], *order[:half]])))
    said: list[dict[str, float] | None] = []
    errors: list[str] = []
    for one in orders:
        try:
            said.append(await ruler.ascore_in_order(group, one))
        except JudgeError as error:
            said.append(None)
            errors.append(str(error))
    return _Group(group, orders, tuple(said), tuple(errors))


def _answers(asked: list[_Group]) -> Checked:
    questions = sum(len(one.said) for one in asked)
    failed = sum(said is None for one in asked for said in one.said)
    figures = {"failed": failed / questions, "questions": float(questions)}
    if failed <= FAILING * questions:
        return Checked(figures=figures)
    error, _ = Counter(error for one in asked for error in one.errors).most_common(1)[0]
    finding = Finding(
        name="judge_fails",
        severity=Severity.CRITICAL if failed * 2 > questions else Severity.WARNING,
        message=f"the judge gave no usable answer to {failed} of {questions} questions, each asked twice at "
        f"most ({error[:200]})",
        fix="if its calls fail, see to its server; else give it a larger context or timeout, fewer runs at "
        "once, or use a model that keeps to JSON",
        trajectories=to_read(t.id for one in asked if None in one.said for t in one.group),
        figures=figures,
    )
    return Checked((finding,), figures)


def _between(asked: list[_Group], first: int, second: int) -> Association | None:
    """Rank agreement within groups of two of the orders."""
    return association(
        (
            [(a[name], b[name]) for name in a]
            for one in asked
            if (a := one.said[first]) is not None and (b := one.said[second]) is not None
        ),
        least=9,
    )


def _steady(asked: list[_Group]) -> Checked:
    again, turned = _between(asked, 0, 1), _between(asked, 0, 2)
    if again is None or turned is None:
        return Checked(skipped="the judge told too few runs apart")
    figures = {"rho_again": again.rho, "rho_reordered": turned.rho}
    if min(again.rho, turned.rho) >= STEADY:
        return Checked(figures=figures)
    alone = again.rho < STEADY
    finding = Finding(
        name="judge_unsteady",
        severity=Severity.WARNING,
        message=f"the judge's ranking agrees with itself to {again.rho:+.2f} when it is asked the same "
        f"again, and to {turned.rho:+.2f} when the runs stand in reverse",
        fix="ask at temperature 0 and with more votes (Ruler(votes=3) or 5), or take a stronger judge"
        if alone
        else "what changes is only the order: ask with more votes (Ruler(votes=3) or 5), or about fewer "
        "runs at once",
        trajectories=to_read(t.id for one in asked for t in one.group),
        figures=figures,
    )
    return Checked((finding,), figures)


def _place(asked: list[_Group]) -> Checked:
    rows: list[list[tuple[float, float]]] = []
    for one in asked:
        last = max(len(one.group) - 1, 1)
        for i, member in enumerate(one.group):
            rows.append(
                [
                    (order.index(i) / last, said[member.id])
                    for order, said in zip(one.orders[1:], one.said[1:], strict=True)
                    if said is not None
                ]
            )
    found = association(rows)
    if found is None:
        figures = {"score_first_to_last": 0.0}
        # Whoever scores a run the same wherever it stands has no favourite place.
        still = sum(len({y for _, y in row}) == 1 for row in rows) * 2 > len(rows)
        return Checked(figures=figures) if still else Checked(skipped="too few answers")
    slope = _slope(rows)
    figures = {"score_first_to_last": slope, "rho_place": found.rho}
    if abs(slope) < PLACE or found.p > CHANCE:
        return Checked(figures=figures)
    finding = Finding(
        name="judge_prefers_place",
        severity=Severity.WARNING,
        message=f"the same run gets {abs(slope):.2f} {'more' if slope > 0 else 'less'} when it stands last "
        f"instead of first (p={found.p:.1g})",
        fix="Ruler shuffles, so that this is noise and no bias: ask with more votes (votes=3 or 5), each "
        "has another order; a judge of your own has to shuffle too",
        trajectories=to_read(t.id for one in asked for t in one.group),
        figures=figures | {"p": found.p},
    )
    return Checked((finding,), figures)


def _slope(rows: list[list[tuple[float, float]]]) -> float:
    """Least squares within members: score for the way from first to last place."""
    above = below = 0.0
    for row in rows:
        if len(row) > 1:
            x, y = fmean(p for p, _ in row), fmean(s for _, s in row)
            above += sum((p - x) * (s - y) for p, s in row)
            below += sum((p - x) ** 2 for p, _ in row)
    return above / below if below else 0.0


def _now(asked: list[_Group]) -> Checked:
    steady = _between(asked, 0, 1)
    rows: list[list[tuple[float, float]]] = []
    for one in asked:
        valid = [said for said in one.said if said is not None]
        kept = [(recorded_score(t), fmean(said[t.id] for said in valid)) for t in one.group if valid]
        rows.append([(score, now) for score, now in kept if score is not None])
    found = association(rows, least=9)
    if found is None:
        return Checked(skipped="too few of the asked runs have a recorded score of RULER")
    figures = {"rho_recorded": found.rho}
    if found.rho >= STALE or steady is None or steady.rho < STEADY:
        return Checked(figures=figures)
    finding = Finding(
        name="stale_verdicts",
        severity=Severity.CRITICAL,
        message=f"the judge agrees with itself to {steady.rho:+.2f}, and with the recorded scores of "
        f"{found.members} runs to {found.rho:+.2f}: those are of other content, another rubric or another "
        "judge",
        fix="a cache's key must hold all that was judged, the rubric and the judge's name (VerdictCache "
        "does that); throw the cache away and score again",
        trajectories=to_read(t.id for one in asked for t in one.group),
        figures=figures,
    )
    return Checked((finding,), figures)
