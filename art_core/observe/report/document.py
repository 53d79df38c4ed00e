"""The report as one HTML document.

Invariant: the file loads nothing, runs nothing, and says so to the browser (Content-Security-Policy);
whatever a model, tool, scenario or setting contributed is escaped text.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from art_core.jsonl import write_lines
from art_core.observe.report.examples import Change, Extremes, Met, changes, extremes
from art_core.observe.report.style import CSS
from art_core.observe.run_view import (
    ENVIRONMENT,
    RunView,
    hint_of,
    outcome_words,
    signs_html,
    state_words,
    view_run,
)
from art_core.store import Store
from art_core.views.curves import Curve, short_number
from art_core.views.html import trajectory_html
from art_core.views.phases import phase_legend, phase_svg
from art_core.views.svg import chart, text
from art_core.views.text import brief, short_id, shorten

CSP = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_MOST_EVENTS = 500
_MOST_SETTING = 300


def write_report(store: Store, run_id: str, path: Path | str, *, examples: int = 3) -> Path:
    """Write a run's report; the file appears whole or not at all.

    Args:
        store: where the run is.
        run_id: its id.
        path: the file.
        examples: how many scenarios are shown before and after.

    Returns:
        The file.

    Raises:
        UnknownRunError: there is no such run.
        StoreError: the record cannot be read, or the file cannot be written.
    """
    path = Path(path)
    document = report_html(store, run_id, examples=examples)
    write_lines(path, [document])
    return path


def report_html(store: Store, run_id: str, *, examples: int = 3) -> str:
    """A run's report as an HTML document; see `write_report`."""
    view = view_run(store, run_id)
    title = text(f"{brief(view.run.model)}, run {short_id(view.run.id)}")
    sections = (
        ("curves", "Curves", _curves(view)),
        ("changes", "The same scenarios, before and after", _changes(changes(store, view.run.id, examples))),
        ("extremes", "Best and worst", _extremes(extremes(store, view.run.id))),
        ("events", "Events", _events(view)),
        ("settings", "Settings", _table(view.run.config)),
        ("surroundings", "Surroundings", _surroundings(view)),
    )
    links = "".join(f'<a href="#{anchor}">{heading}</a>' for anchor, heading, body in sections if body)
    bodies = "".join(
        f'<section id="{anchor}"><h2>{heading}</h2>{body}</section>'
        for anchor, heading, body in sections
        if body
    )
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{CSP}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{title}</title><style>{CSS}</style></head>'
        f'<body><header><h1>{title}</h1>{_summary(view)}<div class="signs">{signs_html(view.signs())}</div>'
        f"<nav>{links}</nav></header><main>{bodies}</main>"
        f"<footer>Made {made} by art-langgraph {text(version('art-langgraph'))}.</footer></body></html>"
    )


# -- at a glance -------------------------------------------------------------------------------------


def _summary(view: RunView) -> str:
    run = view.run
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_at))
    last = run.ended_at or max((at for at, _ in view.step_times), default=run.started_at)
    facts = [
        ("state", text(state_words(view))),
        ("began", began),
        ("took", _span(last - run.started_at)),
        ("training steps", f"{view.steps}"),
        ("rollouts", text(outcome_words(view.outcomes))),
    ]
    reward = view.curves.get("reward_mean")
    if reward is not None and reward.finite:
        first, newest = reward.finite[0], reward.finite[-1]
        facts.insert(0, ("mean reward", f"{short_number(first[1])} to {short_number(newest[1])}"))
    return "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts) + "</dl>"


def _span(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def _curves(view: RunView) -> str:
    if not view.curves:
        return "<p>No training step was recorded.</p>"
    marks = view.marks()
    first = view.first_curves()
    shown = {curve.name for curve in first}
    rest = [curve for name, curve in view.curves.items() if name not in shown]

    def charts(curves: Sequence[Curve]) -> str:
        return (
            '<div class="charts">'
            + "".join(chart(c, marks=marks, hint=hint_of(c.name)) for c in curves)
            + "</div>"
        )

    parts = [charts(first)]
    if bar := phase_svg(view.curves):
        legend = "".join(
            f'<li><svg width="9" height="9" aria-hidden="true"><rect width="9" height="9" fill="{colour}"/>'
            f"</svg> {text(words)}</li>"
            for colour, words in phase_legend(view.curves)
        )
        parts.append(
            f'<h3>Time of the last step</h3><div class="wide">{bar}</div><ul class="legend">{legend}</ul>'
        )
    if rest:
        parts.append(f"<details><summary>{len(rest)} more metrics</summary>{charts(rest)}</details>")
    return "".join(parts)


# -- trajectories ------------------------------------------------------------------------------------


def _changes(found: Sequence[Change]) -> str:
    return "".join(
        f"<h3>{text(shorten(change.scenario_id, 200))}</h3>"
        f'<div class="pair">{_met("before", change.before)}{_met("after", change.after)}</div>'
        for change in found
    )


def _met(when: str, met: Met) -> str:
    words = f"{when}: version {met.number}, mean reward {short_number(met.mean)}"
    said = "".join(
        f"<p>{text(shorten(score.author, 100))}: {text(shorten(score.explanation, 2000))}</p>"
        for score in met.scores[-1:]
        if score.explanation
    )
    return f"<article><h4>{text(words)}</h4>{said}{trajectory_html(met.typical, unfolded=True)}</article>"


def _extremes(found: Sequence[Extremes]) -> str:
    parts: list[str] = []
    for of in found:
        parts.append(f"<h3>version {of.number}</h3>")
        pair = (("best", of.best), ("worst", of.worst))
        shown = "".join(
            f"<article><h4>{name}: {short_number(t.reward or 0.0)}</h4>"
            f"{trajectory_html(t, unfolded=True)}</article>"
            for name, t in pair
        )
        parts.append(f'<div class="pair">{shown}</div>')
    return "".join(parts)


# -- the rest ----------------------------------------------------------------------------------------


def _events(view: RunView) -> str:
    told = [event for event in view.events if event.kind != ENVIRONMENT]
    if not told:
        return ""
    rows = "".join(
        f"<tr><td>{time.strftime('%m-%d %H:%M:%S', time.localtime(e.created_at))}</td>"
        f"<td>{text(brief(e.kind))}</td><td>{text(shorten(e.message, 2000))}</td></tr>"
        for e in told[-_MOST_EVENTS:]
    )
    left_out = len(told) - _MOST_EVENTS
    note = f"<p>The first {left_out:,} events are left out.</p>" if left_out > 0 else ""
    return f'{note}<div class="wide"><table class="events">{rows}</table></div>'


def _surroundings(view: RunView) -> str:
    recorded = [event.data for event in view.events if event.kind == ENVIRONMENT]
    return _table(recorded[-1]) if recorded else "<p>Not recorded.</p>"


def _table(data: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th scope='row'>{text(shorten(name, 100))}</th>"
        f"<td>{text(shorten(value, _MOST_SETTING))}</td></tr>"
        for name, value in _flat(data)
    )
    return f'<div class="wide"><table class="facts">{rows}</table></div>' if rows else ""


def _flat(data: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as dotted names."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, Any]", value), f"{before}{name}.")
        elif isinstance(value, list):
            yield f"{before}{name}", ", ".join(map(str, cast("list[Any]", value))) or "none"
        elif isinstance(value, float) and math.isfinite(value):
            yield f"{before}{name}", f"{value:g}"
        else:
            yield f"{before}{name}", "none" if value is None else str(value)
