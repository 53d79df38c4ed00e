"""``report``: one HTML file that says how a run went."""

from pathlib import Path
from typing import Annotated

import typer

from art_core.cli.options import ROOT, AsJson, Project, Root, Run, Url, opened


def report(
    run: Run = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            "-o",
            help="File to write; report-<run>.html if left out.",
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    examples: Annotated[
        int, typer.Option("--examples", min=0, max=20, help="Scenarios that are shown before and after.")
    ] = 3,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's report: one HTML file with curves, trajectories before and after, and settings.

    It opens without a network and runs no script.
    """
    from art_core.cli.output import cell, show, show_json
    from art_core.jsonl import is_stream
    from art_core.observe.report import write_report
    from art_core.store.finding import find_run
    from art_core.views.text import short_id

    with opened(project, root, url) as store:
        found = find_run(store, run)
        path = write_report(
            store, found.id, to or Path(f"report-{short_id(found.id)}.html"), examples=examples
        )
    if is_stream(path):  # the document is the output
        return
    size = path.stat().st_size
    if as_json:
        show_json({"path": path.resolve(), "run": found.id, "bytes": size})
    else:
        show(cell(f"{path.resolve()}  ({size / 1024:,.0f} KiB)"))
