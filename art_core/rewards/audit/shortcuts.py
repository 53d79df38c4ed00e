"""Ways to a reward that need no good answer: length, number of steps, form, place in the group.

Invariant: what is compared is within groups, and where people's labels cover the runs it is held fixed by
them: an answer that is longer because it is better is no shortcut.
"""

from collections.abc import Callable
from typing import NamedTuple

from art_core.rewards.audit.answers import answer
from art_core.rewards.audit.check import Checked
from art_core.rewards.audit.contents import answer_length, form, length, step_count
from art_core.rewards.audit.evidence import Evidence, reward_of
from art_core.rewards.audit.finding import Finding, Severity, to_read
from art_core.rewards.audit.ranks import Association, association, concordance, partial
from art_core.rewards.audit.variance import explained
from art_core.rewards.labels import Labels
from art_core.types import Trajectory

FOLLOWS = 0.65
"""Rank correlation from which a reward is said to follow a quantity."""
TIGHT = 0.55
"""Somers' D from which more of a quantity nearly always means more reward: good runs may well be longer."""
SHORT = 200.0
"""Texts three quarters of which are shorter than this have no length to speak of, in characters."""
HAIR = 0.05
"""Rewards that differ by less than this share of their range are equal here."""
IS_IT = 0.9
"""From here on it is little else."""
CHANCE = 1e-3
"""Findings that chance gives more often than this are none. Several quantities are tried at once."""
DECIDES = 0.9
"""Share of the variance that the form explains from which content does not matter."""
PLACE = 0.25
"""Correlation with the place in the group that matters; it should be none at all."""


class _Quantity(NamedTuple):
    name: str
    noun: str
    value: Callable[[Trajectory], float | None]
    matters_from: float


_LENGTHS = (
    _Quantity("length", "length of all that was written", length, SHORT),
    _Quantity("answer_length", "length of the answer", answer_length, SHORT),
)
_STEPS = (_Quantity("steps", "number of calls", step_count, 0.0),)


def with_length(evidence: Evidence, labels: Labels | None) -> Checked:
    """Whether the reward follows how much was written."""
    fix = (
        "give the audit the function (reward=) to know which; then reward what is said, not how much: "
        "limit the length in the prompt or by max_tokens, subtract a little Length(), tell the judge in "
        "its rubric that length is no merit"
    )
    return _follows("follows_length", _LENGTHS, evidence, labels, fix)


def with_steps(evidence: Evidence, labels: Labels | None) -> Checked:
    """Whether the reward follows how many calls were made."""
    fix = (
        "a reward of the outcome should tell members of equal number of steps apart; lower the weight of "
        "what counts calls, or give an outcome that is finer"
    )
    return _follows("follows_steps", _STEPS, evidence, labels, fix)


def _follows(
    name: str, quantities: tuple[_Quantity, ...], evidence: Evidence, labels: Labels | None, fix: str
) -> Checked:
    figures: dict[str, float] = {}
    strongest: tuple[_Quantity, Association] | None = None
    for quantity in quantities:
        found = _association(quantity, evidence, labels) if _matters(quantity, evidence) else None
        if found is None:
            continue
        figures[f"rho_{quantity.name}"] = found.rho
        if strongest is None or abs(found.rho) > abs(strongest[1].rho):
            strongest = quantity, found
    if strongest is None:
        return Checked(skipped="too few scored runs in groups where both vary, or little is written at all")
    quantity, found = strongest
    hair = HAIR * (max(evidence.rewards) - min(evidence.rewards))
    tight = concordance(evidence.columns(quantity.value), hair) or 0.0
    figures["concordance"] = tight
    if abs(found.rho) < FOLLOWS or found.p > CHANCE or abs(tight) < TIGHT:
        return Checked(figures=figures)
    ranked = sorted(
        (t for members in evidence.scored for t in members if quantity.value(t) is not None),
        key=lambda t: (quantity.value(t) or 0.0) * (1 if found.rho > 0 else -1),
        reverse=True,
    )
    more = "more" if found.rho > 0 else "less"
    finding = Finding(
        name=name,
        severity=Severity.CRITICAL if abs(found.rho) >= IS_IT else Severity.WARNING,
        message=f"within groups the reward follows the {quantity.noun} (rank correlation {found.rho:+.2f} "
        f"over {found.members} runs, p={found.p:.1g}): unless good runs have {more} of it anyway, that is "
        "what the policy will learn",
        fix=fix,
        trajectories=to_read(t.id for t in ranked),
        figures={"rho": found.rho, "p": found.p, "runs": found.members, "concordance": tight},
    )
    return Checked((finding,), figures)


def _matters(quantity: _Quantity, evidence: Evidence) -> bool:
    """Whether there is enough of it to make a difference."""
    values = sorted(v for members in evidence.scored for t in members if (v := quantity.value(t)) is not None)
    return bool(values) and values[3 * len(values) // 4] >= quantity.matters_from


def _association(quantity: _Quantity, evidence: Evidence, labels: Labels | None) -> Association | None:
    if labels is not None and labels.scores:
        rows = [
            [
                (value, reward_of(t), labels.scores[t.id])
                for t in members
                if t.id in labels.scores and (value := quantity.value(t)) is not None
            ]
            for members in evidence.scored
        ]
        if (held := partial(rows)) is not None:
            return held
    return association(evidence.columns(quantity.value), by_value=True)


def by_form(evidence: Evidence, labels: Labels | None) -> Checked:
    """Whether the form of the answer alone decides the reward."""
    rows = [[(form(answer(t)), answer(t), reward_of(t)) for t in members] for members in evidence.scored]
    found = explained(rows)
    if found is None or not found.between:
        return Checked(skipped="too few runs of equal form in one group, or forms that never differ")
    figures = {"share_form": found.share}
    if found.share < DECIDES or _people_agree(evidence, labels):
        return Checked(figures=figures)
    finding = Finding(
        name="form_only",
        severity=Severity.CRITICAL,
        message=f"the form of the answer explains {found.share:.0%} of the reward's variance within groups: "
        "answers that look alike are worth the same, whatever they say",
        fix="reward the content as well, and let the form be a gate: quality.gated(Format(...))",
        trajectories=to_read(t.id for t in evidence.best()),
        figures={"share": found.share, "freedom": found.freedom},
    )
    return Checked((finding,), figures)


def by_place(evidence: Evidence, labels: Labels | None) -> Checked:
    """Whether a member's place in its group, which means nothing, has to do with its reward."""
    places = [[(float(i), reward_of(t)) for i, t in enumerate(members)] for members in evidence.scored]
    found = association(places, by_value=True)
    if found is None:
        return Checked(skipped="too few scored runs")
    figures = {"rho_place": found.rho}
    if abs(found.rho) < PLACE or found.p > CHANCE:
        return Checked(figures=figures)
    where = "first" if found.rho < 0 else "last"
    finding = Finding(
        name="follows_place",
        severity=Severity.CRITICAL,
        message=f"members that stand {where} in their group have higher rewards (rank correlation "
        f"{found.rho:+.2f} over {found.members} runs, p={found.p:.1g}), although their order is arbitrary",
        fix="a judge that reads all members in one order prefers a place: shuffle them and ask more than "
        "once (Ruler(votes=3) does); if the groups were sorted by reward before the audit, give them "
        "unsorted",
        trajectories=to_read(
            (members[0] if where == "first" else members[-1]).id for members in evidence.scored
        ),
        figures={"rho": found.rho, "p": found.p, "runs": found.members},
    )
    return Checked((finding,), figures)


def _people_agree(evidence: Evidence, labels: Labels | None) -> bool:
    """Whether the reward is what people say, closely."""
    if labels is None:
        return False
    pairs = [
        [(labels.scores[t.id], reward_of(t)) for t in members if t.id in labels.scores]
        for members in evidence.scored
    ]
    found = association(pairs)
    return found is not None and found.rho > 0.8
