"""Curves as SVG: one small chart for one metric, for notebooks and reports.

Invariant: a chart loads nothing and runs nothing, reads in light and in dark (it takes the colour of the text
around it), and every word in it is escaped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from art_core.views.curves import Curve, Range, short_number
from art_core.views.text import brief, safe, shorten

WIDTH, HEIGHT = 320, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 26, 20
_MOST_POINTS = 400
_MOST_LABELLED = 120
_ACCENT = "#2f6fb3"  # 4.5:1 on white, 3.6:1 on #111: enough for a line on either
_MARK = "#b3562f"


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a step, drawn as a vertical line."""

    step: int
    text: str


def chart(curve: Curve, *, title: str | None = None, marks: Sequence[Mark] = (), hint: str = "") -> str:
    """One curve as an SVG element of `WIDTH` by `HEIGHT`.

    Args:
        curve: what is drawn.
        title: its heading; None: the metric's name.
        marks: drawn where they lie within the curve's steps.
        hint: what the metric means, shown when pointed at.
    """
    name = brief(title or curve.name, 40)
    shown = curve.thinned(_MOST_POINTS)
    points = shown.finite
    xs = Range.of(float(step) for step, _ in points)
    ys = Range.of(value for _, value in points)

    def x(step: float) -> float:
        return _LEFT + xs.place(step) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - ys.place(value) * (HEIGHT - _TOP - _BOTTOM)

    said = f"{name}: {short_number(curve.last)} at the last of {len(curve.steps)} steps"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" aria-label="{text(said)}" font-family="sans-serif" font-size="11" '
        'fill="currentColor">',
        f"<title>{text(f'{said}. {hint}' if hint else said)}</title>",
        f'<text x="4" y="14" font-weight="600">{text(name)}</text>',
        f'<text x="{WIDTH - _RIGHT}" y="14" text-anchor="end">{text(short_number(curve.last))}</text>',
    ]
    for value, at in ((ys.high, _TOP), (ys.low, HEIGHT - _BOTTOM)):
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at}" y2="{at}" stroke="currentColor" '
            'stroke-opacity="0.2"/>'
            f'<text x="{_LEFT - 4}" y="{at + 4}" text-anchor="end" opacity="0.8">{short_number(value)}</text>'
        )
    if points:
        ends = [(points[0][0], "start")] + ([(points[-1][0], "end")] if len(points) > 1 else [])
        for step, anchor in ends:
            parts.append(
                f'<text x="{x(step):.1f}" y="{HEIGHT - 5}" text-anchor="{anchor}" opacity="0.8">{step}</text>'
            )
        for mark in marks:
            if points[0][0] <= mark.step <= points[-1][0]:
                parts.append(
                    f'<line x1="{x(mark.step):.1f}" x2="{x(mark.step):.1f}" y1="{_TOP}" '
                    f'y2="{HEIGHT - _BOTTOM}" stroke="{_MARK}" stroke-dasharray="3 3" stroke-width="1.5">'
                    f"<title>{text(shorten(f'step {mark.step}: {mark.text}', 200))}</title></line>"
                )
    else:
        parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no finite value</text>')
    for piece in shown.pieces():
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in piece)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_ACCENT}" stroke-width="2"/>')
        if len(piece) == 1:
            parts.append(
                f'<circle cx="{x(piece[0][0]):.1f}" cy="{y(piece[0][1]):.1f}" r="2.5" fill="{_ACCENT}"/>'
            )
    for step, value in curve.thinned(_MOST_LABELLED).finite:
        parts.append(
            f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="5" fill="{_ACCENT}" fill-opacity="0">'
            f"<title>step {step}: {short_number(value)}</title></circle>"
        )
    return "".join(parts) + "</svg>"


def text(words: str) -> str:
    """Somebody's words, harmless inside an element and inside an attribute."""
    return escape(safe(words))
