"""A check: one question that an audit asks of a reward, and what came of it.

Invariant: a check that could not be made says why; that nothing was found is only said where somebody looked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from art_core.rewards.audit.evidence import Evidence
from art_core.rewards.audit.finding import Finding
from art_core.rewards.labels import Labels


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of a check.

    Attributes:
        findings: what is wrong.
        figures: what was measured, also where nothing is wrong.
        skipped: why the check could not be made; None when it was.
    """

    findings: tuple[Finding, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A check of the record alone.

    Attributes:
        name: in snake case.
        question: what it asks, for a person.
        run: the record and people's labels, if any, to what came of it.
    """

    name: str
    question: str
    run: Callable[[Evidence, Labels | None], Checked]
