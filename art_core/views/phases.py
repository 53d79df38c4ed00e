"""Phases: where the time of a training step went, as one bar.

Invariant: a phase that was not measured has no share; the shares of those that were add up to the whole bar.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rich.text import Text

from art_core.observe.metrics import METRICS
from art_core.views.curves import Curve, short_number
from art_core.views.text import brief

PREFIX = "time/"
"""Metrics of this prefix are seconds of one phase of a training step."""

WHOLE = f"{PREFIX}step"
"""All phases together."""

_COLOURS = ("blue", "green", "magenta", "yellow", "cyan", "red", "white")
_HEX = ("#2f6fb3", "#3b8254", "#8a4fa3", "#9a6a00", "#1d7f8c", "#b3562f", "#666666")


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase's part of the last training step."""

    name: str
    seconds: float


def phases(curves: Mapping[str, Curve]) -> Sequence[Phase]:
    """The phases of the newest step for which any was measured, in the order of the catalogue."""
    measured = {
        name.removeprefix(PREFIX): curve
        for name, curve in curves.items()
        if name.startswith(PREFIX) and name != WHOLE and curve.steps
    }
    newest = max((curve.steps[-1] for curve in measured.values()), default=0)
    return [
        Phase(brief(name, 40), curve.last)
        for name, curve in sorted(measured.items(), key=_place)
        if curve.steps[-1] == newest and curve.last > 0
    ]


def _place(phase: tuple[str, Curve]) -> tuple[int, str]:
    name = f"{PREFIX}{phase[0]}"
    return (list(METRICS).index(name) if name in METRICS else len(METRICS)), name


def phase_bar(curves: Mapping[str, Curve], width: int) -> Text | None:
    """The last step's phases as a line of blocks with a legend; None where none was measured."""
    found = phases(curves)
    total = sum(phase.seconds for phase in found)
    if not total:
        return None
    line, legend = Text(), Text()
    for phase, colour in zip(found, _cycle(_COLOURS, len(found)), strict=True):
        line.append("█" * max(1, round(width * phase.seconds / total)), style=colour)
        legend.append("■ ", style=colour).append(f"{phase.name} {short_number(phase.seconds)} s  ")
    line.truncate(width)
    return line.append("\n").append_text(legend)


def phase_svg(curves: Mapping[str, Curve], width: int = 640) -> str:
    """The last step's phases as SVG; empty where none was measured."""
    found = phases(curves)
    total = sum(phase.seconds for phase in found)
    if not total:
        return ""
    parts, x = list[str](), 0.0
    for phase, colour in zip(found, _cycle(_HEX, len(found)), strict=True):
        share = phase.seconds / total * width
        words = escape(f"{phase.name}: {short_number(phase.seconds)} s ({phase.seconds / total:.0%})")
        parts.append(
            f'<rect x="{x:.1f}" y="0" width="{share:.1f}" height="22" fill="{colour}">'
            f"<title>{words}</title></rect>"
        )
        x += share
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 22" width="{width}" height="22" '
        f'role="img" aria-label="time by phase of the last step">{"".join(parts)}</svg>'
    )


def phase_legend(curves: Mapping[str, Curve]) -> Sequence[tuple[str, str]]:
    """Colour and words of each phase, in the order of the bar."""
    found = phases(curves)
    return [
        (colour, f"{phase.name} {short_number(phase.seconds)} s")
        for phase, colour in zip(found, _cycle(_HEX, len(found)), strict=True)
    ]


def _cycle(colours: Sequence[str], count: int) -> list[str]:
    return [colours[i % len(colours)] for i in range(count)]
