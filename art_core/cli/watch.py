"""``watch``: a run live in the terminal.

Invariant: what is shown was recorded; the command only reads, so that it may come and go as it likes.

A terminal gets one picture that is redrawn; a file or a pipe gets a line for each training step and event;
``--json`` gets a JSON document a line.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_core.cli.exits import ExitCode
from art_core.cli.options import ROOT, AsJson, Project, Root, Run, Url, opened

if TYPE_CHECKING:
    from rich.console import RenderableType

    from art_core.observe.run_view import RunView
    from art_core.store import Store
    from art_core.store.following import News
    from art_core.store.records import Event, Metric


def watch(
    run: Run = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="When the run ends, or before there is one, wait for the next."),
    ] = False,
    every: Annotated[
        float, typer.Option("--every", min=0.1, max=3600, help="Seconds between two looks.")
    ] = 1.0,
    project: Project = None,
    root: Root = ROOT,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Watch a run live: curves, phases, counts, events; ends when the run ends.

    A run that was resumed goes on as a new run of the same model, which is followed. Exits with 1 when the
    run failed, or its process died and nothing goes on from it.
    """
    from art_core.cli.output import Terminal

    with opened(project, root, url, wait=follow) as store:
        looks = _looks(store, run, follow, every)
        if as_json:
            last = _as_json(looks)
        elif Terminal().is_terminal:
            last = _as_picture(looks)
        else:
            last = _as_lines(looks)
    if last is not None and last.run.state in ("failed", "running"):  # running: its process has gone
        raise typer.Exit(ExitCode.FINDING)


@dataclass(frozen=True, slots=True)
class _Look:
    """What one look at the store found.

    Attributes:
        view: the run so far.
        metrics: those that are new.
        events: those that are new.
        first: whether this run was not watched before.
        ended: whether there will be no more of this run.
    """

    view: "RunView"
    metrics: "tuple[Metric, ...]"
    events: "tuple[Event, ...]"
    first: bool
    ended: bool


def _looks(store: "Store", name: str | None, follow: bool, every: float) -> "Iterator[_Look]":
    """A look now, and one whenever time has passed, until the run has ended."""
    run_id = _first_run(store, name, follow, every)
    while True:
        successor = yield from _looks_at(store, run_id, follow, every)
        if successor is None:
            return
        run_id = successor


def _first_run(store: "Store", name: str | None, follow: bool, every: float) -> str:
    from art_core.cli.exits import note
    from art_core.errors import UnknownRunError
    from art_core.store.finding import find_run

    told = False
    while True:
        try:
            return find_run(store, name).id
        except UnknownRunError as missing:
            if not follow or name not in (None, "last"):
                raise
            if not told:
                note(f"{missing}; waiting for it")
                told = True
            time.sleep(every)


def _looks_at(store: "Store", run_id: str, follow: bool, every: float) -> Any:
    """Looks at one run; returns the run to watch after it, or None."""
    from art_core.observe.dashboard.standing import standing
    from art_core.observe.run_view import RunView, curves_of
    from art_core.store.finding import count_outcomes
    from art_core.store.following import Place, news

    place, numbers, events = Place(), dict[tuple[int, str], Any](), list[Any]()
    for earlier in store.lineage(run_id)[:-1]:  # a restart is no end of a curve
        numbers.update({(m.step, m.name): m for m in store.metrics(earlier)})
        events += store.events(earlier)
    first, gone = True, False
    while True:
        found: News = news(store, run_id, place)
        place = found.place
        numbers.update({(m.step, m.name): m for m in found.metrics})
        events += found.events
        with store.read() as connection:
            stands = standing(connection, found.run)
        # Twice, because a process that has just ended may have written its end in between.
        over = found.run.state != "running" or (gone and stands.gone)
        gone = stands.gone
        view = RunView(
            run=found.run,
            curves=curves_of(list(numbers.values())),
            events=events,
            outcomes=count_outcomes(store, run_id),
            step_times=sorted((m.created_at, step) for (step, _), m in numbers.items()),
            standing=stands,
        )
        replaced = found.successor is not None
        yield _Look(view, found.metrics, found.events, first, over or replaced)
        first = False
        if replaced and (follow or not over):
            return found.successor
        if over and not follow:
            return None
        time.sleep(every)


# -- for programs ----------------------------------------------------------------------------------


def _as_json(looks: "Iterator[_Look]") -> "RunView | None":
    from art_core.cli.output import show_json

    view: RunView | None = None
    for look in looks:
        view = look.view
        if look.first:
            show_json({"type": "run", "run": view.run, "outcomes": view.outcomes})
        for step, values, at in _by_step(look.metrics):
            show_json({"type": "metrics", "step": step, "values": values, "created_at": at})
        for event in look.events:
            told = {
                "kind": event.kind,
                "message": event.message,
                "data": event.data,
                "created_at": event.created_at,
            }
            show_json({"type": "event", **told})
        if look.ended and not look.first:
            show_json({"type": "run", "run": view.run, "outcomes": view.outcomes})
    return view


def _by_step(metrics: "tuple[Metric, ...]") -> Iterator[tuple[int, dict[str, float], float]]:
    values: dict[int, dict[str, float]] = {}
    at: dict[int, float] = {}
    for metric in metrics:
        values.setdefault(metric.step, {})[metric.name] = metric.value
        at[metric.step] = metric.created_at
    for step in sorted(values):
        yield step, values[step], at[step]


# -- for files and pipes -----------------------------------------------------------------------------


def _as_lines(looks: "Iterator[_Look]") -> "RunView | None":
    from rich.text import Text

    from art_core.cli.output import Terminal
    from art_core.observe.run_view import FIRST, clock, event_line, run_headline, sign_lines
    from art_core.views.curves import short_number

    terminal = Terminal()
    view: RunView | None = None
    for look in looks:
        view = look.view
        if look.first:
            terminal.print(run_headline(view), soft_wrap=True)
        lines = [(event.created_at, event_line(event)) for event in look.events]
        for step, values, at in _by_step(look.metrics):
            told = [f"{name} {short_number(values[name])}" for name in FIRST if name in values]
            lines.append((at, Text(f"{clock(at)}  step {step}  {'  '.join(told)}")))
        for _, line in sorted(lines, key=lambda dated: dated[0]):
            terminal.print(line, soft_wrap=True)
        if look.ended:
            if not look.first:
                terminal.print(run_headline(view), soft_wrap=True)
            for sign in sign_lines(view.signs()):
                terminal.print(sign, soft_wrap=True)
    return view


# -- for people ----------------------------------------------------------------------------------------


def _as_picture(looks: "Iterator[_Look]") -> "RunView | None":
    from rich.live import Live

    from art_core.cli.output import Terminal

    terminal = Terminal()
    view: RunView | None = None
    with Live(console=terminal, auto_refresh=False, vertical_overflow="crop") as live:
        for look in looks:
            if look.first and view is not None:
                live.console.print(f"{view.run.model} goes on as a new run")
            view = look.view
            live.update(picture(view, terminal.width, terminal.height), refresh=True)
    return view


def picture(view: "RunView", width: int, height: int) -> "RenderableType":
    """A run on one screen of ``width`` by ``height`` characters: as many curves and events as fit."""
    from rich.console import Group
    from rich.text import Text

    from art_core.observe.run_view import curve_grid, event_line, run_headline, sign_titles
    from art_core.views.phases import phase_bar

    parts: list[RenderableType] = [run_headline(view)]
    if signs := view.signs():
        parts.append(sign_titles(signs))
    bar = phase_bar(view.curves, min(width, 100))
    left = height - 3 - (2 if bar else 0) - (1 if signs else 0)
    across = max(1, width // 38)
    inner = min(60, width // across - 3)
    events = view.events[-max(3, min(8, left // 4)) :]
    rows = max(1, (left - len(events) - 1) // 7)
    curves = view.first_curves()[: rows * across]
    if curves:
        parts.append(curve_grid(curves, across, inner, 4))
    else:
        parts.append(Text("no training step yet", style="dim"))
    if bar is not None:
        parts += [Text(), bar]
    if events:
        parts.append(Text())
        for event in events:
            line = event_line(event, limit=10 * width)
            line.truncate(width, overflow="ellipsis")
            parts.append(line)
    return Group(*parts)
