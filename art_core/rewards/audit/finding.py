"""One thing that is wrong with a reward, or may be: what was seen, where to look, and what to do.

Invariant: a message says what was measured in figures, and those figures are in ``figures`` as numbers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

TO_READ = 5
"""Most trajectories that a finding names; nobody reads more."""


class Severity(StrEnum):
    """How much a finding matters."""

    CRITICAL = "critical"
    """Training on this reward teaches something else than what was meant, or nothing."""
    WARNING = "warning"
    """Part of the signal is lost or bent; read the trajectories before a long run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a reward does and should not.

    Attributes:
        name: which check found it, in snake case; the same for the same fault in every report.
        message: what was seen, for a person.
        fix: what to do about it.
        trajectories: ids of those to read first, at most five.
        figures: the numbers that it was decided by; shares are from 0 to 1.
    """

    name: str
    severity: Severity
    message: str
    fix: str
    trajectories: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict[str, float])


def to_read(ids: Iterable[str]) -> tuple[str, ...]:
    """The first few different ids."""
    return tuple(dict.fromkeys(ids))[:TO_READ]


def share(part: float, whole: float) -> str:
    """A share in words: ``12 of 40 (30%)``."""
    return f"{part:g} of {whole:g} ({part / whole:.0%})"
