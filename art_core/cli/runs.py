"""``runs``: all runs of a project, or one of them at a glance."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_core.cli.options import ROOT, AsJson, Project, Root, Url, opened

if TYPE_CHECKING:
    from art_core.observe.run_view import RunView
    from art_core.store.browse import RunSummary


def runs(
    run: Annotated[
        str | None,
        typer.Argument(
            help="Show this one: its id, or a part of it that no other has; 'last' is the newest.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Most runs that are listed.")] = 20,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first; or show one: curves, events, how its rollouts ended."""
    from art_core.cli.output import show, show_json
    from art_core.observe.dashboard.standing import standing
    from art_core.observe.run_view import view_run
    from art_core.store.browse import run_summaries

    with opened(project, root, url) as store:
        if run is not None:
            view = view_run(store, run)
            if as_json:
                show_json(run_json(view))
            else:
                show(view)
            return
        everything = run_summaries(store)
        found, total = everything[:limit], len(everything)
        with store.read() as connection:
            words = [standing(connection, summary.run).word for summary in found]
    if as_json:
        show_json({"project": store.project, "runs": [_summary_json(s) for s in found]})
    else:
        show(_runs_table(found, words, total, store.project))


def _summary_json(summary: "RunSummary") -> dict[str, Any]:
    run = asdict(summary.run)
    run.pop("config")
    rest = {name: getattr(summary, name) for name in ("steps", "trajectories", "reward_mean", "sparkline")}
    return run | rest


def run_json(view: "RunView") -> dict[str, Any]:
    """A run whole, as its ``--json`` says it."""
    return {
        "run": asdict(view.run),
        "steps": view.steps,
        "signs": [sign.as_dict() for sign in view.signs()],
        "outcomes": view.outcomes,
        "metrics": {name: list(zip(c.steps, c.values, strict=True)) for name, c in view.curves.items()},
        "events": [
            {"kind": e.kind, "message": e.message, "data": e.data, "created_at": e.created_at}
            for e in view.events
        ],
    }


def _runs_table(found: "list[RunSummary]", words: list[str], total: int, project: str) -> Any:
    from rich.console import Group

    from art_core.cli.output import cell, number, table
    from art_core.observe.run_view import ago
    from art_core.views.curves import spark
    from art_core.views.text import short_id

    if not found:
        return cell(f"project {project} has no runs yet")
    restarted = any(summary.run.continues is not None for summary in found)
    headings = ("run", "~model", "state", "began", ">steps", ">rollouts", ">reward", "curve")
    listed = table(*headings, *(("goes on from",) if restarted else ()))
    for summary, word in zip(found, words, strict=True):
        run = summary.run
        style = {"failed": "red", "finished": "green"}.get(word, "yellow")
        listed.add_row(
            cell(short_id(run.id), 16),
            cell(run.model, 40),
            cell(word, style=style),
            ago(run.started_at),
            f"{summary.steps}",
            f"{summary.trajectories:,}",
            number(summary.reward_mean),
            spark(summary.sparkline, 12),
            *((cell(short_id(run.continues or ""), 16),) if restarted else ()),
        )
    more = total - len(found)
    return Group(listed, cell(f"{more} more: --limit {total}", style="dim")) if more else listed
