"""``doctor``: what this machine can run, what is missing, and how to get it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_core.cli.exits import ExitCode
from art_core.cli.options import ROOT, AsJson, Root

if TYPE_CHECKING:
    from rich.console import RenderableType

    from art_core.observe.diagnosis import Diagnosis


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Read versions only; do not try whether packages work.")
    ] = False,
    root: Root = ROOT,
    as_json: AsJson = False,
) -> None:
    """Say what this machine can run: Python, PyTorch, GPUs, vLLM, Unsloth, memory, disk, models, extras.

    Each package is tried in a process of its own, so that one that crashes is a finding. Exits with 1 when
    something that is there does not work; what is merely not installed is no fault.
    """
    from art_core.cli.output import plain, show, show_json
    from art_core.observe.diagnosis import diagnose

    found = diagnose(Path(root), quick=quick)
    if as_json:
        checks = [plain(check) for check in found.checks]
        can = [plain(ability) for ability in found.can]
        show_json({"ok": found.ok, "checks": checks, "can": can, "environment": found.environment})
    else:
        show(_view(found))
    if not found.ok:
        raise typer.Exit(ExitCode.FINDING)


def _view(found: "Diagnosis") -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from art_core.views.text import safe

    marks = {"ok": ("ok", "green"), "missing": ("--", "yellow"), "broken": ("!!", "bold red")}
    checks, can = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    for made in (checks, can):
        made.add_column(no_wrap=True)
        made.add_column(no_wrap=True)
        made.add_column(overflow="fold")
    for check in found.checks:
        mark, style = marks[check.status]
        said = Text(safe(check.found))
        if check.fix:
            said.append(f"\n{safe(check.fix)}", style="cyan")
        checks.add_row(Text(mark, style=style), Text(check.name), said)
    for ability in found.can:
        mark, style = ("yes", "green") if ability.possible else ("no", "yellow")
        can.add_row(Text(mark, style=style), Text(ability.what), Text(safe(ability.why), style="dim"))
    return Group(checks, Text(), Text("this machine can", style="bold"), can)
