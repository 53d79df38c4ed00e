"""``langfuse``: send what was recorded to Langfuse, bring traces from there, see how far it is."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from art_core.cli.exits import ExitCode
from art_core.cli.options import ROOT, AsJson, Project, Root, Url, opened
from art_core.cli.output import show, show_json
from art_core.errors import ConfigError, UnknownProjectError

if TYPE_CHECKING:
    from art_core.store import Store

app = typer.Typer(
    help="Send what was recorded to Langfuse, bring traces from there, see how far it is. The project is the "
    "one that LANGFUSE_PUBLIC_KEY, LANGFUSE_SECRET_KEY and LANGFUSE_BASE_URL name.",
    no_args_is_help=True,
    add_completion=False,
)

Run: TypeAlias = Annotated[
    str | None, typer.Option("--run", help="Of this run only: its id, or a part of it.", show_default=False)
]
Into: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--run",
        help="Keep them with this run: its id, or a part of it; with none if left out.",
        show_default=False,
    ),
]
Reward: TypeAlias = Annotated[
    str, typer.Option("--reward", help="Name of the score that is the reward; the others become components.")
]


@app.command("export")
def export(
    run: Run = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Give every trace this tag.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Send also what was confirmed before.")] = False,
    environment: Annotated[str | None, typer.Option(help="Langfuse's environment.")] = None,
    rate: Annotated[float, typer.Option(min=1, help="Requests a minute at most.")] = 600.0,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Send what Langfuse has not confirmed yet.

    May be stopped and repeated: what is there is left alone, what has changed is replaced. Ends with 1 where
    something was refused or is left.
    """
    from art_langgraph.langfuse.client import LangfuseClient
    from art_langgraph.langfuse.connection import LangfuseConnection
    from art_langgraph.langfuse.export import ExportOptions, export_to_langfuse

    connection = LangfuseConnection.from_env().replace(requests_per_minute=rate)
    if environment is not None:
        connection = connection.replace(environment=environment)
    with (
        opened(project, root, url) as store,
        LangfuseClient(connection) as client,
        _bar(as_json, "to Langfuse") as told,
    ):
        result = export_to_langfuse(
            store,
            _run_id(store, run),
            client=client,
            options=ExportOptions(tags=tuple(tag or ())),
            again=again,
            progress=told,
        )
    if as_json:
        show_json(asdict(result) | {"complete": result.complete})
    else:
        show(str(result))
        for trajectory_id, why in result.failed.items():
            show(f"refused: {trajectory_id}: {why}")
    raise typer.Exit(ExitCode.OK if result.complete else ExitCode.FINDING)


@app.command("import")
def import_(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A file exported from Langfuse, which is taken whole; without one, the server is asked."
        ),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", help="They have this tag; may be repeated.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the traces are called.")] = None,
    session: Annotated[str | None, typer.Option(help="Of this session.")] = None,
    environment: Annotated[str | None, typer.Option(help="Of this environment.")] = None,
    since: Annotated[
        str | None,
        typer.Option(
            help="Begun then or later: a date, a time, '7d', '12h', or 'last' for since the last import."
        ),
    ] = None,
    until: Annotated[str | None, typer.Option(help="Begun before that.")] = None,
    score: Annotated[str | None, typer.Option(help="They have a score of this name.")] = None,
    score_min: Annotated[float | None, typer.Option(help="The score is at least this.")] = None,
    score_max: Annotated[float | None, typer.Option(help="The score is at most this.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many, the newest.")] = None,
    reward: Reward = "reward",
    run: Into = None,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Bring production traces into the record: for fine-tuning, judging, audits, and as scenarios.

    May be repeated: a trace is one trajectory, and new scores become new rewards. A project that is named and
    does not exist is made. Ends with 1 where traces could not be kept.
    """
    from art_langgraph.langfuse.client import LangfuseClient
    from art_langgraph.langfuse.importing import import_file, import_from_langfuse
    from art_langgraph.langfuse.traces import TraceFilter, traces_in_file

    wanted = TraceFilter(
        tags=tuple(tag or ()),
        name=name,
        session_id=session,
        environment=environment,
        since=None if since in (None, "last") else _time(since, "--since"),
        until=None if until is None else _time(until, "--until"),
        score=score,
        score_min=score_min,
        score_max=score_max,
        limit=limit,
    )
    if file is not None and (since is not None or wanted != TraceFilter()):
        raise ConfigError(
            f"{file} is taken whole: --tag, --since and the other filters are for asking the server; leave "
            "them out, or export from Langfuse what you want"
        )
    with ExitStack() as held:
        # Before the project is made, should it be missing: what is wrong leaves nothing behind.
        client = held.enter_context(LangfuseClient()) if file is None else None
        if file is not None:
            next(traces_in_file(file), None)
        store = held.enter_context(_opened_or_made(project, root, url))
        run_id = _run_id(store, run)
        if file is not None:
            result = import_file(store, file, reward=reward, run_id=run_id)
        else:
            told = held.enter_context(_bar(as_json, "from Langfuse"))
            result = import_from_langfuse(
                store,
                wanted,
                client=client,
                reward=reward,
                run_id=run_id,
                only_new=since == "last",
                progress=told,
            )
    if as_json:
        show_json(asdict(result))
    else:
        show(str(result))
        for trace, why in result.failed.items():
            show(f"failed: {trace}: {why}")
    raise typer.Exit(ExitCode.FINDING if result.failed else ExitCode.OK)


@app.command()
def status(
    run: Run = None,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """See whether the keys are good, and what an export would send.

    Nothing is sent. Ends with 1 where Langfuse is behind.
    """
    from art_langgraph.langfuse.client import LangfuseClient
    from art_langgraph.langfuse.export import Exporter
    from art_langgraph.langfuse.ledger import Ledger

    with opened(project, root, url) as store, LangfuseClient() as client, Ledger.beside(store) as ledger:
        named, due = client.check(), Exporter(store, client, ledger).due(_run_id(store, run))
        last = ledger.last_confirmed(client.connection.destination)
        found: dict[str, Any] = {
            "server": client.connection.base_url,
            "project": named,
            "confirmed": due.unchanged,
            "to_send": due.left,
            "running": due.running,
            "last_confirmed": last,
            "ledger": str(ledger.path),
        }
    if as_json:
        show_json(found)
    else:
        found["last_confirmed"] = "never" if last is None else datetime.fromtimestamp(last, UTC).isoformat()
        for what, value in found.items():
            show(f"{what.replace('_', ' '):<15} {value}")
    raise typer.Exit(ExitCode.FINDING if due.left else ExitCode.OK)


@contextmanager
def _bar(as_json: bool, what: str) -> Generator[Any]:
    """A progress bar on standard error, where somebody looks; without a total it only moves."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)

        def told(done: int, total: int | None = None) -> None:
            progress.update(task, completed=done, total=total)

        yield told


def _opened_or_made(project: str | None, root: Path, url: str | None) -> "Store":
    from art_core.store import Store
    from art_core.store.finding import open_existing

    try:
        return open_existing(project, root, url=url)
    except UnknownProjectError:
        if project is None:
            raise
        return Store.open(project, root, url=url)


def _run_id(store: "Store", run: str | None) -> str | None:
    from art_core.store.finding import find_run

    return None if run is None else find_run(store, run).id


def _time(text: str | None, option: str) -> datetime:
    given = text or ""
    unit = {"d": "days", "h": "hours", "m": "minutes"}.get(given[-1:])
    if unit and given[:-1].isdecimal():
        return datetime.now(UTC) - timedelta(**{unit: int(given[:-1])})
    try:
        moment = datetime.fromisoformat(given)
    except ValueError:
        raise ConfigError(
            f"{option} {given!r}: give a date (2026-10-01), a time (2026-10-01T09:00), or how long ago (7d)"
        ) from None
    return moment if moment.tzinfo else moment.astimezone()
