"""The runs that are rewarded most, and look as if they should not be.

Invariant: only what stands among the best of its own group is looked at; a degenerate run with a low reward
shows that the reward works.
"""

import re
import zlib
from collections import Counter
from collections.abc import Callable

from art_core.rewards.audit.answers import answer, answered
from art_core.rewards.audit.check import Checked
from art_core.rewards.audit.contents import calls, given
from art_core.rewards.audit.evidence import Evidence
from art_core.rewards.audit.finding import Finding, Severity, share, to_read
from art_core.rewards.labels import Labels
from art_core.rewards.text import plain
from art_core.types import Trajectory

LEAST = 2
"""One odd run among the best is read by nobody in vain, but it is no pattern."""
OFTEN = 0.1
"""Share of the best runs from which it is one."""
REPEATS = 4
"""A tool called this often with the same arguments is a loop."""
SQUEEZED = 0.12
"""Text that deflate shrinks below this share says one thing over and over (English prose: 0.3 to 0.5)."""
LEAST_BEST = 6
"""Fewer best runs show no pattern."""
LONG = 600
"""Characters from which that can be told."""
LISTED = 3
"""Other scenarios' answers in one answer, from which it is a list of guesses."""

_CUE = re.compile(
    r"(?:answer|expected|solution|reference|correct|gold|target|label|key)\W{0,4}(?:\w+\W+){0,3}$", re.I
)
_TO_THE_JUDGE = re.compile(
    r"\b(?:rubric|score of 1|score 1\.0|full (?:score|marks)|highest (?:score|reward)|"
    r"(?:dear|to the) (?:judge|grader|evaluator)|ignore (?:the|all|previous) )",
    re.IGNORECASE,
)


def _empty(run: Trajectory) -> bool:
    steps = answered(run)
    return bool(steps) and not answer(run).strip() and not calls(steps[-1])


def _repeats(run: Trajectory) -> bool:
    text = answer(run)
    if len(text) < LONG:
        return False
    data = text.encode("utf-8", "replace")
    return len(zlib.compress(data, 6)) < SQUEEZED * len(data)


def _cut_off(run: Trajectory) -> bool:
    steps = answered(run)
    return bool(steps) and steps[-1].finish_reason == "length"


def _loops(run: Trajectory) -> bool:
    made = Counter(call for step in answered(run) for call in calls(step))
    return bool(made) and max(made.values()) >= REPEATS


def _to_its_judge(run: Trajectory) -> bool:
    # What the user wrote may be about rubrics.
    return _TO_THE_JUDGE.search(answer(run)) is not None and _TO_THE_JUDGE.search(given(run)) is None


_KINDS: tuple[tuple[str, str, Callable[[Trajectory], bool], str], ...] = (
    ("empty_answer", "have an empty answer", _empty, "make an empty answer an error or the worst answer"),
    (
        "repeats_itself",
        "repeat themselves",
        _repeats,
        "reward content that is said once: count distinct sentences, or let a judge see the answers",
    ),
    (
        "cut_off",
        "were cut off by max_tokens",
        _cut_off,
        "raise max_tokens, or gate the reward on a complete answer; TrainConfig(mask_truncated=True) "
        "leaves such answers out of the gradient",
    ),
    (
        "tool_loop",
        f"call a tool {REPEATS} times or more with the same arguments",
        _loops,
        "pay for what a tool call brought, not for the call; subtract repeated calls",
    ),
    (
        "addresses_judge",
        "speak of scores, rubrics or to their judge",
        _to_its_judge,
        "read them: if the judge gives in, use a stronger judge, and say in the rubric that such runs are "
        "the worst",
    ),
)


def degenerate(evidence: Evidence, labels: Labels | None) -> Checked:
    """Empty, repeating, truncated and looping runs among the best."""
    best = evidence.best()
    if len(best) < LEAST_BEST:
        return Checked(skipped=f"{len(best)} best runs of their groups; {LEAST_BEST} are needed")
    everyone = [t for members in evidence.scored for t in members]
    figures: dict[str, float] = {}
    findings: list[Finding] = []
    for name, what, is_so, fix in _KINDS:
        odd = [t for t in best if is_so(t)]
        figures[name] = len(odd) / len(best)
        # Where the best are no more so than the others, sampling is to blame, and the reward is not.
        usual = sum(map(is_so, everyone)) / len(everyone)
        if len(odd) >= max(LEAST, OFTEN * len(best)) and figures[name] > usual:
            findings.append(
                Finding(
                    name=name,
                    severity=Severity.WARNING,
                    message=f"{share(len(odd), len(best))} of the most rewarded runs {what}",
                    fix=fix,
                    trajectories=to_read(t.id for t in odd),
                    figures={"share": len(odd) / len(best), "best": len(best)},
                )
            )
    return Checked(tuple(findings), figures)


def leaks(evidence: Evidence, labels: Labels | None) -> Checked:
    """Prompts that say the expected answer, and answers that list many."""
    known = [(t, expected) for t in evidence.trajectories if (expected := evidence.expected_answers(t))]
    if not known:
        return Checked(
            skipped="the scenarios have no expected answer (metadata or inputs 'answer', 'expected', ...; "
            "expected= names another key)"
        )
    told = [t for t, expected in known if any(_told(text, given(t)) for text in expected)]
    figures = {"answer_in_prompt": len(told) / len(known)}
    findings: list[Finding] = []
    if len(told) >= max(LEAST, OFTEN * len(known)):
        findings.append(
            Finding(
                name="answer_in_prompt",
                severity=Severity.CRITICAL,
                message=f"in {share(len(told), len(known))} runs the prompt says what the expected answer "
                "is: copying it is all that is learned",
                fix="keep what is expected in the scenario's metadata, which no prompt is made from, and "
                "look for it in system prompts, examples and tool results",
                trajectories=to_read(t.id for t in told),
                figures={"share": len(told) / len(known)},
            )
        )
    everyone = {plain(text) for _, expected in known for text in expected if len(plain(text)) > 2}
    best = [t for t in evidence.best() if evidence.expected_answers(t)]
    listing = [
        t
        for t in best
        if _listed(
            plain(answer(t)), everyone - {plain(x) for x in evidence.expected_answers(t)}, plain(given(t))
        )
    ]
    if best:
        figures["lists_answers"] = len(listing) / len(best)
    if len(listing) >= max(LEAST, OFTEN * len(best)):
        findings.append(
            Finding(
                name="lists_answers",
                severity=Severity.CRITICAL,
                message=f"{share(len(listing), len(best))} of the most rewarded answers name {LISTED} or "
                "more other scenarios' answers beside their own: guessing everything is paid for",
                fix="compare the whole answer (ExactMatch), or only what follows a mark such as 'Answer:', "
                "instead of looking for the expected text anywhere",
                trajectories=to_read(t.id for t in listing),
                figures={"share": len(listing) / len(best)},
            )
        )
    return Checked(tuple(findings), figures)


def _told(expected: str, prompt: str) -> bool:
    """Whether a prompt gives the expected answer as such; a choice or a passage that has it does not."""
    wanted = expected.strip()
    if not wanted:
        return False
    for found in re.finditer(rf"(?<!\w){re.escape(wanted)}(?!\w)", prompt, re.IGNORECASE):
        line = prompt[max(0, found.start() - 60) : found.start()].rsplit("\n", 1)[-1]
        if _CUE.search(line):
            return True
    return False


def _listed(text: str, others: set[str], prompt: str) -> bool:
    named = [
        other
        for other in others
        if other in text  # which is quick, and nearly always says no
        and re.search(rf"(?<!\w){re.escape(other)}(?!\w)", text)
        and other not in prompt
    ]
    return len(named) >= LISTED
