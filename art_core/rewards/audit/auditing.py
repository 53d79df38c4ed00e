"""Auditing: all checks that can be made with what is at hand.

Invariant: one check that finds nothing hides no other, and each one is in the report.

Runs -> groups (`evidence`) -> checks of the record -> with a reward function, probes (`probing`,
`transplant`) -> with a Ruler, its judge asked again (`judging`) -> a report.
"""

from collections.abc import Iterable, Mapping

from art_core.errors import ConfigError
from art_core.rewards.audit.asking import Asker
from art_core.rewards.audit.check import Check, Checked
from art_core.rewards.audit.degenerate import degenerate, leaks
from art_core.rewards.audit.evidence import Evidence, evidence
from art_core.rewards.audit.failures import failing_reward, scored_failures
from art_core.rewards.audit.finding import Finding
from art_core.rewards.audit.judging import judge_again
from art_core.rewards.audit.nodes import rewarded_nodes
from art_core.rewards.audit.parts import agreement, scales, signs
from art_core.rewards.audit.people import people
from art_core.rewards.audit.probing import probe
from art_core.rewards.audit.report import AuditReport, Looked, worst_first
from art_core.rewards.audit.shortcuts import by_form, by_place, with_length, with_steps
from art_core.rewards.audit.spread import saturation, spread
from art_core.rewards.audit.transplant import transplant
from art_core.rewards.audit.verdicts import equal_runs, repeated
from art_core.rewards.labels import Labels
from art_core.rewards.ruler import Ruler
from art_core.scoring import RewardFunction
from art_core.sync import run_sync
from art_core.types import Trajectory, TrajectoryGroup

CHECKS: tuple[Check, ...] = (
    Check("spread", "do rewards differ within groups?", spread),
    Check("saturation", "has the reward room left?", saturation),
    Check("failures", "are broken runs scored?", scored_failures),
    Check("unscorable", "are there runs that could not be scored?", failing_reward),
    Check("length", "does it follow how much was written?", with_length),
    Check("steps", "does it follow the number of calls?", with_steps),
    Check("form", "does the form of the answer alone decide it?", by_form),
    Check("place", "does it follow the place in the group?", by_place),
    Check("signs", "do known components pull the right way?", signs),
    Check("agreement", "do components work against each other?", agreement),
    Check("scales", "does one component drown the others?", scales),
    Check("nodes", "are nodes rewarded for what they did?", rewarded_nodes),
    Check("verdicts", "are recorded verdicts of this content?", repeated),
    Check("equal_runs", "are equal runs worth the same?", equal_runs),
    Check("best", "do the most rewarded runs look degenerate?", degenerate),
    Check("leaks", "is the expected answer given away?", leaks),
    Check("people", "does it agree with people?", people),
)
"""What the record alone can tell."""

QUESTIONS: Mapping[str, str] = {
    "probes": "what does the function say of changed runs?",
    "answers": "can the function score the runs as they are?",
    "repeatable": "does the function say the same twice?",
    "recorded": "does it still say what was recorded?",
    "rare_input": "can it score answers that are rare?",
    "identity": "does it depend on ids?",
    "padding": "do words that say nothing pay?",
    "content": "does content matter, or only its form?",
    "listing": "does listing every answer pay?",
    "emptiness": "does saying nothing pay?",
    "node_words": "whose words do node rewards follow?",
    "judge_answers": "does the judge answer as it was asked to?",
    "judge_steady": "does the judge agree with itself?",
    "judge_place": "does the judge prefer a place?",
    "judge_now": "does the judge still say what was recorded?",
}
"""What is asked when there is somebody to be asked."""


REFUTED_BY: Mapping[str, str] = {"follows_length": "padding", "form_only": "content"}
"""Findings that rest on what goes together, and the question that shows whether one makes the other."""


async def aaudit(
    runs: Iterable[Trajectory] | Iterable[TrajectoryGroup],
    *,
    labels: Labels | Mapping[str, float] | None = None,
    reward: RewardFunction | None = None,
    ruler: Ruler | None = None,
    expected: str | None = None,
    groups: int = 12,
    timeout: float | None = 60.0,
    concurrency: int = 16,
    seed: int = 0,
) -> AuditReport:
    """Look for what is wrong with a reward.

    Args:
        runs: groups, or trajectories (those of one group, else of one scenario, are compared). Thirty or more
            groups make most checks sure; what there is too little for is said in the report.
        labels: what people said (`labels_of`), or scores by trajectory id.
        reward: the function that gave the rewards; it is asked about runs as they are and changed, some
            two hundred times.
        ruler: the judge that gave them; it is asked four times about each of ``groups`` groups.
        expected: key of the right answer in the scenarios' metadata or inputs; None: the usual ones.
        groups: most groups that function and judge are asked about.
        timeout: seconds that the function may take for one run; None for no limit.
        concurrency: most questions to the function at the same time.
        seed: decides which groups are asked about.

    Raises:
        ConfigError: something else than runs was given, there are none, or a number is out of range.
        RewardError: the reward function takes the wrong arguments.
    """
    for name, value in (("groups", groups), ("concurrency", concurrency)):
        if value < 1:
            raise ConfigError(f"{name}={value}: expected at least 1")
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"timeout={timeout!r}: expected seconds above 0")
    given = evidence(runs, expected)
    if not given.trajectories:
        raise ConfigError("there are no trajectories to audit; look at the run's id and filters")
    told = Labels(labels) if isinstance(labels, Mapping) else labels
    found = {check.name: (check.question, check.run(given, told)) for check in CHECKS}
    asker = None
    if reward is not None:
        asker = Asker(reward, timeout=timeout, concurrency=concurrency)
        probed = await probe(given, asker, groups, seed)
        probed["node_words"] = await transplant(given, asker, groups, seed)
        found |= {name: (QUESTIONS[name], checked) for name, checked in probed.items()}
    before = 0
    if ruler is not None:
        before = ruler.usage.calls
        judged = await judge_again(given, ruler, groups, seed)
        found |= {name: (QUESTIONS[name], checked) for name, checked in judged.items()}
    return _report(
        given,
        found,
        reward_calls=0 if asker is None else asker.calls,
        judge_calls=0 if ruler is None else ruler.usage.calls - before,
    )


def audit(
    runs: Iterable[Trajectory] | Iterable[TrajectoryGroup],
    *,
    labels: Labels | Mapping[str, float] | None = None,
    reward: RewardFunction | None = None,
    ruler: Ruler | None = None,
    expected: str | None = None,
    groups: int = 12,
    timeout: float | None = 60.0,
    concurrency: int = 16,
    seed: int = 0,
) -> AuditReport:
    """`aaudit` from sync code; same arguments, result and errors."""
    return run_sync(
        lambda: aaudit(
            runs,
            labels=labels,
            reward=reward,
            ruler=ruler,
            expected=expected,
            groups=groups,
            timeout=timeout,
            concurrency=concurrency,
            seed=seed,
        )
    )


def _report(
    given: Evidence, found: Mapping[str, tuple[str, Checked]], *, reward_calls: int, judge_calls: int
) -> AuditReport:
    findings: list[Finding] = []
    for _, checked in found.values():
        known = {finding.name for finding in findings}
        # The record and a question may find the same thing; what was found first names the record's runs.
        findings += [f for f in checked.findings if f.name not in known and not _refuted(f, found)]
    return AuditReport(
        findings=worst_first(findings),
        checks=tuple(
            Looked(name=name, question=question, figures=checked.figures, skipped=checked.skipped)
            for name, (question, checked) in found.items()
        ),
        groups=len(given.groups),
        trajectories=len(given.trajectories),
        scored=len(given.rewards),
        reward_calls=reward_calls,
        judge_calls=judge_calls,
    )


def _refuted(finding: Finding, found: Mapping[str, tuple[str, Checked]]) -> bool:
    """Whether the function was asked, and does not do what the record made it look like."""
    if finding.figures.get("rho", 0.0) < 0:  # words that are added say nothing of rewards for fewer
        return False
    asked = found.get(REFUTED_BY.get(finding.name, ""))
    return asked is not None and asked[1].skipped is None and not asked[1].findings
