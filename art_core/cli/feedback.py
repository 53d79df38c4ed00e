"""``feedback``: what people think of trajectories; said, listed, exported."""

import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from art_core.cli.options import ROOT, AsJson, Project, Root, Url, opened

if TYPE_CHECKING:
    from art_core.store import Store

app = typer.Typer(
    help="Say what you think of trajectories; list and export what people said. Rewards stay as they are.",
    no_args_is_help=True,
)

Id: TypeAlias = Annotated[str, typer.Argument(help="A trajectory's id, or a part of it that no other has.")]
Comment: TypeAlias = Annotated[str, typer.Option("--comment", "-c", help="In your own words.")]
Author: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--author",
        envvar="ART_AUTHOR",
        help="Who says it; the user's name here if left out.",
        show_default=False,
    ),
]


@app.command()
def thumb(
    trajectory: Id,
    direction: Annotated[Literal["up", "down"], typer.Argument(help="up or down.")],
    comment: Comment = "",
    author: Author = None,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Thumb up, thumb down."""
    from art_core.rewards.feedback import thumb as keep

    with opened(project, root, url) as store:
        found, who = _about(store, trajectory), author or _user()
        keep(store, found, up=direction == "up", author=who, comment=comment)
    _tell(found, "thumb", 1.0 if direction == "up" else -1.0, who, comment, None, as_json)


@app.command()
def score(
    trajectory: Id,
    value: Annotated[float, typer.Argument(min=0, max=1, help="From 0 (useless) to 1 (as good as can be).")],
    comment: Comment = "",
    author: Author = None,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Give a score from 0 to 1."""
    from art_core.rewards.feedback import rate

    with opened(project, root, url) as store:
        found, who = _about(store, trajectory), author or _user()
        rate(store, found, value, author=who, comment=comment)
    _tell(found, "score", value, who, comment, None, as_json)


@app.command()
def prefer(
    better: Id,
    worse: Annotated[str, typer.Argument(help="The one that it is better than.")],
    tie: Annotated[bool, typer.Option("--tie", help="They are as good as each other.")] = False,
    comment: Comment = "",
    author: Author = None,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Prefer one trajectory to another of the same scenario."""
    from art_core.rewards.feedback import prefer as keep

    with opened(project, root, url) as store:
        found, over, who = _about(store, better), _about(store, worse), author or _user()
        keep(store, found, over=over, tie=tie, author=who, comment=comment)
    _tell(found, "choice", 0.5 if tie else 1.0, who, comment, over, as_json)


@app.command("list")
def list_(
    trajectory: Annotated[
        str | None, typer.Argument(help="Of this one; of all if left out.", show_default=False)
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Of this run's trajectories (or 'last').", show_default=False)
    ] = None,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List what people said, oldest first."""
    from rich.text import Text

    from art_core.cli.judged import feedback_line
    from art_core.cli.output import cell, show, show_json
    from art_core.store.finding import find_run, find_trajectory_id
    from art_core.views.text import short_id

    with opened(project, root, url) as store:
        said = store.feedback(
            None if trajectory is None else find_trajectory_id(store, trajectory),
            None if run is None else find_run(store, run).id,
        )
    if as_json:
        show_json({"feedback": said})
    elif not said:
        show(cell("nobody has said anything yet"))
    else:
        show(*(Text.assemble(cell(short_id(one.trajectory_id)), "  ", feedback_line(one)) for one in said))


@app.command()
def export(
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", "-o", help="File; left out: standard output.", dir_okay=False, show_default=False
        ),
    ] = None,
    form: Annotated[
        Literal["records", "pairs"],
        typer.Option(
            "--form", help="What was said, one entry a line; or choices as TRL's DPOTrainer reads them."
        ),
    ] = "records",
    node: Annotated[
        str | None,
        typer.Option("--node", help="Of pairs: compare what this LangGraph node said.", show_default=False),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", help="Of this run's trajectories (or 'last').", show_default=False),
    ] = None,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Export what people said as JSON lines, oldest first. With --to the file appears whole or not at all."""
    from art_core.cli.output import cell, show, show_json
    from art_core.errors import ConfigError
    from art_core.jsonl import is_stream, write_lines
    from art_core.store.finding import find_run

    if as_json and to is None:
        raise ConfigError("--json says what became of a file: name one (--to), or leave --json out")
    with opened(project, root, url) as store:
        run_id = None if run is None else find_run(store, run).id
        lines = _records(store, run_id) if form == "records" else _pairs(store, run_id, node)
    if to is None:
        for line in lines:
            print(line)
        return
    count = write_lines(to, lines)
    if is_stream(to):  # the lines are the output
        return
    if as_json:
        show_json({"path": to.resolve(), "lines": count})
    else:
        show(cell(f"{to}: {count:,} lines"))


def _records(store: "Store", run_id: str | None) -> list[str]:
    from art_core.cli.output import as_json

    return [as_json(said) for said in store.feedback(run_id=run_id)]


def _pairs(store: "Store", run_id: str | None, node: str | None) -> list[str]:
    from art_core.cli.output import as_json
    from art_core.rewards.dpo import preference_pairs
    from art_core.rewards.labels import labels_of

    choices = labels_of(store.feedback(run_id=run_id)).preferences
    return [as_json(pair.row()) for pair in preference_pairs(choices, store.trajectory, node=node)]


def _about(store: "Store", trajectory: str) -> str:
    from art_core.store.finding import find_trajectory_id

    return find_trajectory_id(store, trajectory)


def _tell(
    trajectory_id: str, kind: str, value: float, author: str, comment: str, over: str | None, as_json: bool
) -> None:
    """Say what was kept."""
    from art_core.cli.output import cell, show, show_json

    if as_json:
        said = {"trajectory_id": trajectory_id, "kind": kind, "value": value, "author": author}
        show_json({**said, "comment": comment, "over": over})
    else:
        show(cell(f"kept: {kind} by {author} on {trajectory_id}"))


def _user() -> str:
    from art_core.errors import ConfigError

    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        raise ConfigError("this user has no name here: say who you are with --author") from None
