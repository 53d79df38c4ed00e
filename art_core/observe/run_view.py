"""A run as people see it: its curves, what happened, and how its rollouts ended.

Invariant: a view is what the store held when it was made; looking again makes another one.
"""

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from art_core.observe.metrics import spec_of
from art_core.observe.signs import Sign, signs_of
from art_core.views.curves import Curve, braille, short_number
from art_core.views.svg import Mark, chart, text
from art_core.views.text import brief, safe, short_id, shorten

if TYPE_CHECKING:
    from art_core.observe.dashboard.standing import Standing
    from art_core.store import Store
    from art_core.store.records import Event, Metric, Run

FIRST = (
    "reward_mean",
    "reward_mean_scored",
    "reward_group_std",
    "success_rate",
    "trajectories_failed",
    "groups_without_spread",
    "kl_old_new",
    "kl_base",
    "entropy",
    "clip_fraction",
    "effective_sample_size",
    "grad_norm",
    "learning_rate",
    "entries",
    "tokens_per_second/rollout",
)
"""Metrics that say whether a run learns, and if not, why: those that are looked at first, in this order."""

ENVIRONMENT = "environment"
"""Kind of the event that says where a run ran: a fact about all of it, not a moment in it."""

_LAST_EVENTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run, as it was when somebody looked.

    Attributes:
        run: its record.
        curves: by metric name; those of `FIRST` come first, then the others by name. Curves of a run that
            goes on from another one begin where that one began; an event marks the place.
        events: oldest first, with those of the runs that it goes on from.
        outcomes: trajectories by status.
        step_times: when each training step was recorded (Unix seconds), and its number; ascending.
        standing: whether it goes on, or its process died; None where nobody looked.
    """

    run: "Run"
    curves: Mapping[str, Curve]
    events: "Sequence[Event]"
    outcomes: Mapping[str, int]
    step_times: Sequence[tuple[float, int]] = ()
    standing: "Standing | None" = None

    @property
    def steps(self) -> int:
        """Number of the last training step; 0 before the first."""
        return max((curve.steps[-1] for curve in self.curves.values()), default=0)

    def signs(self) -> list[Sign]:
        """What stands out: whether it learns, and if not, why."""
        return signs_of(self.curves, self.events, self.standing)

    def first_curves(self) -> list[Curve]:
        """Those of `FIRST` that there are; any others when there are none."""
        found = [self.curves[name] for name in FIRST if name in self.curves]
        return found or list(self.curves.values())[:12]

    def marks(self) -> list[Mark]:
        """What happened, at the training step that was under way."""
        times = [at for at, _ in self.step_times]
        found: list[Mark] = []
        for event in self.events:
            place = bisect_left(times, event.created_at)
            if event.kind != ENVIRONMENT and place < len(times):
                found.append(Mark(self.step_times[place][1], f"{brief(event.kind)}: {event.message}"))
        return found

    def __rich__(self) -> RenderableType:
        return run_rich(self)

    def _repr_html_(self) -> str:
        return run_html(self)


def view_run(store: "Store", run_id: str | None = None) -> RunView:
    """Look at a run.

    Args:
        store: where it is.
        run_id: its id, or a part of it that no other has; None: the newest.

    Raises:
        UnknownRunError: there is none, or there are several.
    """
    from art_core.observe.dashboard.standing import standing
    from art_core.store.finding import count_outcomes, find_run

    run = find_run(store, run_id)
    with store.read() as connection:
        stands = standing(connection, run)
    line = store.lineage(run.id)
    metrics = [metric for one in line for metric in store.metrics(one)]
    return RunView(
        run=run,
        curves=curves_of(metrics),
        # What is added to a step later is no other time of it.
        step_times=sorted((at, step) for step, at in {m.step: m.created_at for m in metrics[::-1]}.items()),
        events=tuple(event for one in line for event in store.events(one)),
        outcomes=count_outcomes(store, run.id),
        standing=stands,
    )


def curves_of(metrics: "Sequence[Metric]") -> dict[str, Curve]:
    """Metrics by name, the telling ones first; of two values at one step the later one counts."""
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for metric in metrics:
        found[metric.name][metric.step] = metric.value
    order = {name: place for place, name in enumerate(FIRST)}
    curves: dict[str, Curve] = {}
    for name in sorted(found, key=lambda name: (order.get(name, len(FIRST)), name)):
        points = sorted(found[name].items())
        curves[name] = Curve(name, tuple(s for s, _ in points), tuple(v for _, v in points))
    return curves


def hint_of(name: str) -> str:
    """What a metric measures and what is healthy; empty for a user's own."""
    spec = spec_of(name)
    return "" if spec is None else f"{spec.what} Healthy: {spec.healthy}" if spec.healthy else spec.what


# -- in words ------------------------------------------------------------------------------------------


def ago(then: float, now: float | None = None) -> str:
    """How long ago something was, roughly."""
    seconds = max(0.0, (time.time() if now is None else now) - then)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def state_words(view: RunView) -> str:
    """A run's state; of one that should go on and does not, since when."""
    stands = view.standing
    if stands is None or stands.going or stands.word == view.run.state:
        return view.run.state
    why = ", its process has gone" if stands.gone else ""
    return f"{stands.word} (last heard of {ago(stands.last_sign)}{why})"


def clock(at: float) -> str:
    """A time of day, here."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def outcome_words(outcomes: Mapping[str, int]) -> str:
    """How many trajectories there are, by what became of them."""
    total = sum(outcomes.values())
    parts = [f"{count:,} {safe(status)}" for status, count in sorted(outcomes.items())]
    return f"{total:,} trajectories" + (f" ({', '.join(parts)})" if len(parts) > 1 else "")


# -- in a terminal -----------------------------------------------------------------------------------


def run_rich(view: RunView, *, width: int = 36, height: int = 4) -> Group:
    """A run in a terminal: a line about it, its first curves in braille, its last events."""
    parts: list[RenderableType] = [run_headline(view), *sign_lines(view.signs())]
    if view.curves:
        parts.append(curve_grid(view.first_curves(), 2, width, height))
    if view.events:
        parts += [Text(), Text("last events", style="bold")]
        parts += [event_line(event) for event in view.events[-_LAST_EVENTS:]]
    return Group(*parts)


def run_headline(view: RunView) -> Text:
    """Id, model, state, steps, trajectories."""
    run = view.run
    line = Text()
    line.append(brief(run.model), style="bold")
    line.append(f"  run {brief(short_id(run.id))}  ")
    line.append(state_words(view), style={"failed": "red", "finished": "green"}.get(run.state, "yellow"))
    line.append(f"  began {ago(run.started_at)}  step {view.steps}  {outcome_words(view.outcomes)}")
    if run.continues is not None:
        line.append(f"  goes on from {brief(short_id(run.continues))}", style="dim")
    return line


_STYLES = {"good": "green", "warn": "yellow", "bad": "red"}


def sign_lines(signs: Sequence[Sign]) -> list[Text]:
    """What stands out, a sentence or two each."""
    return [
        Text().append(sign.title, style=f"bold {_STYLES.get(sign.tone, '')}").append(f" {sign.message}")
        for sign in signs
    ]


def sign_titles(signs: Sequence[Sign]) -> Text:
    """What stands out, on one line."""
    line = Text(no_wrap=True, overflow="ellipsis")
    for sign in signs:
        line.append("  " if line else "").append(sign.title, style=_STYLES.get(sign.tone, ""))
    return line


def curve_grid(curves: Sequence[Curve], across: int, width: int, height: int) -> Table:
    """Curves in rows of so many, each ``width`` characters wide, and two more lines than ``height`` high."""
    grid = Table.grid(padding=(0, 2, 1, 0))
    for start in range(0, len(curves), across):
        grid.add_row(*(curve_panel(curve, width, height) for curve in curves[start : start + across]))
    return grid


def curve_panel(curve: Curve, width: int, height: int) -> Text:
    """One curve in braille under its name and last value."""
    last = short_number(curve.last)
    name = brief(curve.name, width - len(last) - 1)
    panel = Text(no_wrap=True)
    panel.append(f"{name:<{width - len(last)}}", style="bold").append(last, style="cyan")
    values = [v for _, v in curve.finite]
    for line in braille(curve.thinned(width * 2), width, height):
        panel.append("\n").append(line, style="blue")
    if values:
        span = f"{short_number(min(values))} to {short_number(max(values))}"
        steps = f"steps {curve.steps[0]} to {curve.steps[-1]}"
        panel.append(f"\n{f'{span}, {steps}'[:width]}", style="dim")
    return panel


def event_line(event: "Event", limit: int = 300) -> Text:
    """When, what kind, and what was said."""
    line = Text(overflow="fold")
    line.append(clock(event.created_at), style="dim").append(f"  {brief(event.kind)}  ", style="bold")
    return line.append(safe(" ".join(shorten(event.message, limit).split())))


# -- in a notebook -----------------------------------------------------------------------------------


def run_html(view: RunView) -> str:
    """A run in a notebook: a line, its first curves, the others and the events to unfold."""
    run = view.run
    name = text(f"run {brief(short_id(run.id))}")
    told = text(f"{state_words(view)}, step {view.steps}, {outcome_words(view.outcomes)}")
    head = f"<div><b>{text(brief(run.model))}</b> {name}: {told}</div>"
    marks = view.marks()
    first = view.first_curves()
    shown = {curve.name for curve in first}
    rest = [curve for name, curve in view.curves.items() if name not in shown]
    parts = [head, signs_html(view.signs()), _charts(first, marks)]
    if rest:
        parts.append(f"<details><summary>{len(rest)} more metrics</summary>{_charts(rest, marks)}</details>")
    if view.events:
        kinds = Counter(event.kind for event in view.events)
        told = ", ".join(f"{count} {text(brief(kind))}" for kind, count in kinds.most_common(6))
        rows = "".join(
            f"<tr><td>{clock(e.created_at)}</td><td>{text(brief(e.kind))}</td>"
            f'<td style="text-align:left">{text(shorten(e.message, 500))}</td></tr>'
            for e in view.events[-200:]
        )
        parts.append(f"<details><summary>events: {told}</summary><table>{rows}</table></details>")
    return "".join(parts)


def signs_html(signs: Sequence[Sign]) -> str:
    """What stands out, a paragraph each."""
    return "".join(f"<p><b>{text(sign.title)}</b> {text(sign.message)}</p>" for sign in signs)


def _charts(curves: Sequence[Curve], marks: Sequence[Mark]) -> str:
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:8px">'
        + "".join(chart(curve, marks=marks, hint=hint_of(curve.name)) for curve in curves)
        + "</div>"
    )
