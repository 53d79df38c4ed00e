"""Asking a reward function about runs that were changed on purpose, as a test asks a program.

Invariant: the record is not touched, and a probe's verdict rests on what the same function says of the
unchanged run: it is about what the change did, not about how good the run is.

A sample of runs, the best and worst of their groups -> each as it is, twice -> each changed: longer,
scrambled, shortened to a letter, a list of every answer, nothing; under another's id; with rare texts ->
findings. (Metamorphic testing: Chen, Cheung and Yiu 1998.)
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from art_core.rewards.audit.answers import answer, answered, with_answer
from art_core.rewards.audit.asking import Asked, Asker, scored_again
from art_core.rewards.audit.check import Checked
from art_core.rewards.audit.evidence import Evidence, reward_of
from art_core.rewards.audit.finding import Finding, Severity, share, to_read
from art_core.rewards.audit.ranks import association
from art_core.types import Trajectory

MOST = 0.8
"""Share of the probes that have to come out the same way."""
RISE = 0.5
"""Share of the probes from which more text pays: the others may be at a cap."""
SLACK = 0.1
"""Changes below this share of the rewards' range are none."""
LEAST = 4
"""Fewer probes say nothing."""

FILLER = (
    "\n\nAll of this was looked at with care, from more than one side, before it was written down here." * 12
)
RARE: dict[str, str] = {
    "nothing": "",
    "white space": " \n\t ",
    "one letter": "x",
    "a zero": "0",
    "a word for no number": "NaN",
    "a number too large": "-1e999",
    "an open brace": '{"answer": ',
    "an empty list": "[]",
    "emoji": "\N{SLIGHTLY SMILING FACE}\N{ZERO WIDTH JOINER}",
    "half a surrogate": "\ud83d",
    "a NUL": "a\x00b",
    "another script": "١٢ ½ 字",
    "a long answer": "word " * 8000,
}
"""Texts that a policy samples sooner or later."""

_WORD = re.compile(r"[^\W\d_]+")
_DIGIT = re.compile(r"\d")


@dataclass(frozen=True, slots=True)
class Sample:
    """Members that are probed.

    Attributes:
        good: the best of each group, with its reward as the function gives it now.
        bad: the worst of the same groups.
        span: range of these rewards.
    """

    good: tuple[Asked, ...]
    bad: tuple[Asked, ...]
    span: float

    @property
    def slack(self) -> float:
        """What counts as no change."""
        return SLACK * self.span


async def probe(evidence: Evidence, asker: Asker, groups: int, seed: int) -> dict[str, Checked]:
    """What the reward function says of changed runs.

    Args:
        evidence: where runs are taken from.
        asker: asks the function.
        groups: from at most so many groups.
        seed: decides which, and how they are changed.

    Returns:
        What came of each check, by its name.
    """
    rng = random.Random(seed)
    chosen = [m for m in evidence.scored if all(answered(t) for t in m)]
    chosen = sorted(rng.sample(chosen, min(groups, len(chosen))), key=lambda members: members[0].id)
    found: dict[str, Checked] = {}
    if not chosen:
        return {"probes": Checked(skipped="no group with two scored and answered members")}
    first = [await asker.ask(members) for members in chosen]
    again = [await asker.ask(members) for members in chosen]
    found["answers"] = scored_again([one for members in first for one in members])
    found["repeatable"] = _repeats(first, again)
    found["recorded"] = _recorded(first, found["repeatable"])
    found["rare_input"] = await _rare(chosen, asker)
    if found["repeatable"].findings:
        found["probes"] = Checked(skipped="the function does not say the same of the same run twice")
        return found
    sample = _sampled(first)
    if sample is None:
        found["probes"] = Checked(
            skipped=f"fewer than {LEAST} groups have two runs to which the function gives different rewards"
        )
        return found
    found["identity"] = await _identity(sample, asker)
    found["padding"] = await _padding(sample, asker)
    found["content"] = await _content(sample, asker, rng)
    found["listing"] = await _listing(sample, asker, evidence, rng)
    found["emptiness"] = await _emptiness(sample, asker)
    return found


def _sampled(asked: Sequence[Sequence[Asked]]) -> Sample | None:
    good: list[Asked] = []
    bad: list[Asked] = []
    for members in asked:
        valid = sorted((one for one in members if one.reward is not None), key=lambda one: one.value)
        if len(valid) > 1 and valid[-1].value - valid[0].value > 1e-6:
            good.append(valid[-1])
            bad.append(valid[0])
    if len(good) < LEAST:
        return None
    return Sample(tuple(good), tuple(bad), max(g.value for g in good) - min(b.value for b in bad))


def _repeats(first: Sequence[Sequence[Asked]], again: Sequence[Sequence[Asked]]) -> Checked:
    pairs = [
        [(a, b) for a, b in zip(one, two, strict=True) if a.reward is not None and b.reward is not None]
        for one, two in zip(first, again, strict=True)
    ]
    flat = [pair for group in pairs for pair in group]
    if not flat:
        return Checked(skipped="the function scored no run twice")
    values = [a.value for a, _ in flat]
    span = max(values) - min(values)
    change = fmean(abs(a.value - b.value) for a, b in flat)
    same = association([[(a.value, b.value) for a, b in group] for group in pairs], least=8)
    figures = {"mean_change": change} | ({} if same is None else {"rho_again": same.rho})
    if change <= SLACK * span or same is None or same.rho > 0.8:
        return Checked(figures=figures)
    finding = Finding(
        name="unrepeatable",
        severity=Severity.WARNING,
        message=f"asked twice about the same {len(flat)} runs, the reward changes by {change:.3g} on "
        f"average (its range is {span:.3g}), and its ranking within groups agrees with itself only to "
        f"{same.rho:+.2f}",
        fix="what is random in a reward is noise in the gradient: fix its seeds, ask a judge at "
        "temperature 0 or more than once (votes)",
        trajectories=to_read(a.trajectory.id for a, b in flat if abs(a.value - b.value) > SLACK * span),
        figures=figures,
    )
    return Checked((finding,), figures)


def _recorded(first: Sequence[Sequence[Asked]], repeatable: Checked) -> Checked:
    pairs = [[(reward_of(a.trajectory), a) for a in group if a.reward is not None] for group in first]
    flat = [pair for group in pairs for pair in group]
    if not flat or repeatable.findings:
        return Checked(skipped="the function does not say the same twice" if flat else "it scored no run")
    span = max(r for r, _ in flat) - min(r for r, _ in flat)
    other = [a.trajectory.id for r, a in flat if abs(r - a.value) > max(SLACK * span, 1e-6)]
    same = association([[(r, a.value) for r, a in group] for group in pairs], least=8)
    figures = {"changed": len(other) / len(flat)} | ({} if same is None else {"rho_recorded": same.rho})
    # Another scale, as with adaptive weights, keeps the order.
    if len(other) <= SLACK * len(flat) or (same is not None and same.rho > 0.9):
        return Checked(figures=figures)
    finding = Finding(
        name="stale_rewards",
        severity=Severity.CRITICAL,
        message=f"{share(len(other), len(flat))} recorded rewards are not what the function says of the "
        "same runs now",
        fix="if the function has not changed since, rewards were kept under a key that other content "
        "shares: look at its cache, and at results that are matched by order instead of id",
        trajectories=to_read(other),
        figures=figures,
    )
    return Checked((finding,), figures)


async def _rare(chosen: Sequence[Sequence[Trajectory]], asker: Asker) -> Checked:
    runs = [members[0] for members in chosen[:3]]
    plain = await asker.ask(runs)
    runs = [one.trajectory for one in plain if one.reward is not None]
    if not runs:
        return Checked(skipped=f"the function scores no unchanged run either: {plain[0].error}")
    errors: dict[str, str] = {}
    for name, text in RARE.items():
        said = await asker.ask([with_answer(run, text) for run in runs])
        if broken := [one.error for one in said if one.error is not None]:
            errors[name] = broken[0]
    figures = {"rare_inputs": float(len(RARE)), "broken_by": float(len(errors))}
    if not errors:
        return Checked(figures=figures)
    message, _ = Counter(errors.values()).most_common(1)[0]
    finding = Finding(
        name="breaks_on_rare_input",
        severity=Severity.WARNING,
        message=f"the reward cannot score answers that are {', '.join(errors)} ({message[:160]}): such "
        "rollouts fail instead of being worth little, and the policy never learns to avoid them",
        fix="decide what such an answer is worth, before the function divides, takes logarithms or parses",
        trajectories=to_read(run.id for run in runs),
        figures=figures,
    )
    return Checked((finding,), figures)


async def _identity(sample: Sample, asker: Asker) -> Checked:
    moved = [
        replace(good.trajectory, id=bad.trajectory.id, started_at=bad.trajectory.started_at)
        for good, bad in zip(sample.good, sample.bad, strict=True)
    ]
    said = await asker.ask(moved)
    rows = [
        (good, bad, now.value)
        for good, bad, now in zip(sample.good, sample.bad, said, strict=True)
        if now.reward is not None
    ]
    if len(rows) < LEAST:
        return Checked(skipped="too few runs could be scored under another's id")
    stuck = [good for good, bad, now in rows if abs(now - bad.value) < abs(now - good.value)]
    figures = {"follows_id": len(stuck) / len(rows)}
    if len(stuck) < MOST * len(rows):
        return Checked(figures=figures)
    finding = Finding(
        name="follows_id",
        severity=Severity.CRITICAL,
        message=f"in {share(len(stuck), len(rows))} probes the best run of a group, given the worst one's "
        "id, got the worst one's reward: it depends on the id, not on the content",
        fix="key what is cached by everything that is judged, or do not cache",
        trajectories=to_read(good.trajectory.id for good in stuck),
        figures=figures,
    )
    return Checked((finding,), figures)


async def _padding(sample: Sample, asker: Asker) -> Checked:
    said = await asker.ask([with_answer(b.trajectory, answer(b.trajectory) + FILLER) for b in sample.bad])
    rows = [
        (b, now.value - b.value) for b, now in zip(sample.bad, said, strict=True) if now.reward is not None
    ]
    if len(rows) < LEAST:
        return Checked(skipped="too few padded runs could be scored")
    risen = [b for b, gain in rows if gain > sample.slack]
    figures = {"risen": len(risen) / len(rows), "mean_gain": fmean(gain for _, gain in rows)}
    if len(risen) < RISE * len(rows):
        return Checked(figures=figures)
    finding = Finding(
        name="pays_for_length",
        severity=Severity.CRITICAL,
        message="words that say nothing, added to the worst answers, raise the reward of "
        f"{share(len(risen), len(rows))} (by {figures['mean_gain']:.3g} on average; rewards range over "
        f"{sample.span:.3g})",
        fix="reward what is said, not how much: cap what length can earn, or subtract Length()",
        trajectories=to_read(b.trajectory.id for b in risen),
        figures=figures,
    )
    return Checked((finding,), figures)


async def _content(sample: Sample, asker: Asker, rng: random.Random) -> Checked:
    kept = await asker.ask(
        [with_answer(g.trajectory, scrambled(answer(g.trajectory), rng)) for g in sample.good]
    )
    gone = await asker.ask([with_answer(g.trajectory, "x") for g in sample.good])
    rows = [
        (good, good.value - same_form.value)
        for good, same_form, no_form in zip(sample.good, kept, gone, strict=True)
        if same_form.reward is not None
        and no_form.reward is not None
        # Where the answer does not matter at all, something else does: what the environment says, say.
        and good.value - no_form.value > 3 * sample.slack
    ]
    if len(rows) < LEAST:
        return Checked(skipped="the answer's text does not move the reward of enough runs")
    blind = [good for good, loss in rows if loss <= sample.slack]
    figures = {"kept_when_scrambled": len(blind) / len(rows)}
    if len(blind) < MOST * len(rows):
        return Checked(figures=figures)
    finding = Finding(
        name="pays_for_form",
        severity=Severity.CRITICAL,
        message=f"{share(len(blind), len(rows))} of the best answers keep their reward when every word is "
        "replaced by letters at random in the same form",
        fix="reward the content as well, and let the form be a gate: quality.gated(Format(...))",
        trajectories=to_read(good.trajectory.id for good in blind),
        figures=figures,
    )
    return Checked((finding,), figures)


async def _listing(sample: Sample, asker: Asker, evidence: Evidence, rng: random.Random) -> Checked:
    everyone = sorted({text for t in evidence.trajectories for text in evidence.expected_answers(t)[:1]})
    asked: list[tuple[Asked, Asked]] = []
    runs: list[Trajectory] = []
    for good, bad in zip(sample.good, sample.bad, strict=True):
        own = evidence.expected_answers(bad.trajectory)[:1]
        others = [text for text in everyone if text not in own]
        if own and len(others) >= 3:
            listed = [*own, *rng.sample(others, min(8, len(others)))]
            rng.shuffle(listed)
            asked.append((good, bad))
            runs.append(with_answer(bad.trajectory, f"It may be any of these: {', '.join(listed)}."))
    said = await asker.ask(runs)
    rows = [
        (good, bad, now.value) for (good, bad), now in zip(asked, said, strict=True) if now.reward is not None
    ]
    if len(rows) < LEAST:
        return Checked(skipped="too few scenarios with expected answers of their own")
    paid = [bad for good, bad, now in rows if now >= good.value - sample.slack and now > bad.value]
    figures = {"list_is_paid": len(paid) / len(rows)}
    if len(paid) < MOST * len(rows):
        return Checked(figures=figures)
    finding = Finding(
        name="pays_for_listing",
        severity=Severity.CRITICAL,
        message=f"in {share(len(paid), len(rows))} probes an answer that lists many scenarios' answers was "
        "worth as much as the best one: the expected text anywhere is enough",
        fix="compare the whole answer (ExactMatch), or only what follows a mark such as 'Answer:'",
        trajectories=to_read(bad.trajectory.id for bad in paid),
        figures=figures,
    )
    return Checked((finding,), figures)


async def _emptiness(sample: Sample, asker: Asker) -> Checked:
    said = await asker.ask([with_answer(bad.trajectory, "") for bad in sample.bad])
    rows = [
        (good, bad, now.value)
        for good, bad, now in zip(sample.good, sample.bad, said, strict=True)
        if now.reward is not None
    ]
    if len(rows) < LEAST:
        return Checked(skipped="too few empty answers could be scored")
    paid = [bad for good, bad, now in rows if now >= good.value - sample.slack and now > bad.value]
    figures = {"nothing_is_paid": len(paid) / len(rows)}
    if len(paid) < MOST * len(rows):
        return Checked(figures=figures)
    finding = Finding(
        name="pays_for_nothing",
        severity=Severity.CRITICAL,
        message=f"in {share(len(paid), len(rows))} probes an empty answer was worth as much as the best one",
        fix="a cost alone (length, steps, forbidden words) is lowest when nothing is said: gate it by an "
        "answer",
        trajectories=to_read(bad.trajectory.id for bad in paid),
        figures=figures,
    )
    return Checked((finding,), figures)


def scrambled(text: str, rng: random.Random) -> str:
    """Text of the same form that says nothing: every letter and digit is another one."""

    def letters(found: re.Match[str]) -> str:
        return "".join(
            chr(rng.randrange(26) + (ord("A") if c.isupper() else ord("a"))) if c.isalpha() else c
            for c in found.group()
        )

    marks = {
        m.span() for m in re.finditer(r"</?[A-Za-z][\w-]*>|\\boxed|^\s*\w+:|\"\w+\"\s*:", text, re.MULTILINE)
    }
    pieces: list[str] = []
    at = 0
    for start, end in sorted(marks):
        if start >= at:
            pieces += (_other_digits(_WORD.sub(letters, text[at:start]), rng), text[start:end])
            at = end
    pieces.append(_other_digits(_WORD.sub(letters, text[at:]), rng))
    return "".join(pieces)


def _other_digits(text: str, rng: random.Random) -> str:
    return _DIGIT.sub(lambda m: str((int(m.group()) + rng.randrange(1, 10)) % 10), text)
