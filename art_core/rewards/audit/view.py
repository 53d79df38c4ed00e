"""An audit report for a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from art_core.rewards.audit.finding import Severity
from art_core.rewards.audit.report import AuditReport
from art_core.views.text import safe

_STYLE = {Severity.CRITICAL: "bold red", Severity.WARNING: "yellow"}


def report_view(report: AuditReport) -> RenderableType:
    """The findings with their fixes, then what was looked at."""
    head = (
        f"{report.scored} scored of {report.trajectories} trajectories in {report.groups} groups; "
        f"{len(report.findings)} finding{'' if len(report.findings) == 1 else 's'}"
    )
    asked = [f"{n} calls of the {what}" for n, what in _asked(report) if n]
    parts: list[RenderableType] = [Text(", ".join([head, *asked]), style="bold")]
    for finding in report.findings:
        line = Text()
        line.append(f"{finding.severity.value}  ", style=_STYLE[finding.severity])
        line.append(finding.name, style="bold")
        # Messages quote what functions and judges said.
        parts += [Text(), line, Text(f"  {safe(finding.message)}"), Text(f"  Fix: {safe(finding.fix)}")]
        if finding.trajectories:
            parts.append(Text(f"  Read: {safe(', '.join(finding.trajectories))}", style="dim"))
    table = Table(box=None, show_header=False, pad_edge=False)
    for check in report.checks:
        if check.skipped is None:
            figures = ", ".join(f"{name} {value:.3g}" for name, value in check.figures.items())
            table.add_row(check.name, Text(check.question), Text(figures, style="dim"))
        else:
            table.add_row(
                check.name, Text(check.question), Text(f"not checked: {safe(check.skipped)}", style="dim")
            )
    return Group(*parts, Text(), table)


def _asked(report: AuditReport) -> list[tuple[int, str]]:
    return [(report.reward_calls, "reward function"), (report.judge_calls, "judge")]
