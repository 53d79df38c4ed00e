"""What an audit found, and what it could look at.

Invariant: every check is in the report, also those that found nothing and those that could not be made, with
why; findings stand with the worst first.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from art_core.errors import ConfigError
from art_core.rewards.audit.finding import Finding, Severity

if TYPE_CHECKING:
    from rich.console import RenderableType

_ORDER = {Severity.CRITICAL: 0, Severity.WARNING: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What came of one check.

    Attributes:
        name: of the check.
        question: what it asks.
        figures: what it measured; shares are from 0 to 1.
        skipped: why it could not be made; None when it was.
    """

    name: str
    question: str
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    skipped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What an audit found.

    Attributes:
        findings: what is wrong, the worst first.
        checks: what was looked at, in order.
        groups: that were given.
        trajectories: in them.
        scored: of these, those with a reward.
        reward_calls: how often the reward function was asked.
        judge_calls: how often the judge was asked.
    """

    findings: tuple[Finding, ...] = ()
    checks: tuple[Looked, ...] = ()
    groups: int = 0
    trajectories: int = 0
    scored: int = 0
    reward_calls: int = 0
    judge_calls: int = 0

    @property
    def critical(self) -> tuple[Finding, ...]:
        """Findings that make training on this reward worthless."""
        return tuple(f for f in self.findings if f.severity is Severity.CRITICAL)

    def figure(self, check: str, name: str) -> float | None:
        """A figure that a check measured; None where it was not."""
        return next((c.figures.get(name) for c in self.checks if c.name == check), None)

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it; `from_dict` reads it again."""
        found = asdict(self)
        for entry in (*found["findings"], *found["checks"]):
            entry["figures"] = {k: v if math.isfinite(v) else None for k, v in entry["figures"].items()}
        return found

    def to_json(self, *, indent: int | None = None) -> str:
        """`as_dict` as JSON text."""
        return json.dumps(self.as_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "AuditReport":
        """The report that `as_dict` wrote.

        Raises:
            ConfigError: the data is of something else.
        """
        try:
            return cls(
                findings=tuple(_finding(entry) for entry in data["findings"]),
                checks=tuple(
                    Looked(
                        name=entry["name"],
                        question=entry["question"],
                        figures=_figures(entry["figures"]),
                        skipped=entry["skipped"],
                    )
                    for entry in data["checks"]
                ),
                **{name: value for name, value in data.items() if name not in ("findings", "checks")},
            )
        except (KeyError, TypeError, ValueError) as other:
            raise ConfigError(f"this is no audit report: {type(other).__name__}: {other}") from other

    def __rich__(self) -> "RenderableType":
        from art_core.rewards.audit.view import report_view

        return report_view(self)

    def __str__(self) -> str:
        from art_core.views import rendered

        return rendered(self.__rich__(), width=100)


def worst_first(findings: list[Finding]) -> tuple[Finding, ...]:
    """Critical findings first, otherwise in the order of the checks."""
    return tuple(sorted(findings, key=lambda finding: _ORDER[finding.severity]))


def _finding(entry: Mapping[str, Any]) -> Finding:
    return Finding(
        name=entry["name"],
        severity=Severity(entry["severity"]),
        message=entry["message"],
        fix=entry["fix"],
        trajectories=tuple(entry["trajectories"]),
        figures=_figures(entry["figures"]),
    )


def _figures(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else float(value) for name, value in values.items()}
