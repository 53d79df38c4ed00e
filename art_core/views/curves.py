"""Curves: numbers by training step, and how they are thinned and scaled to be drawn.

Invariant: what is drawn are values that were recorded: thinning leaves some out, first and last never, and a
value that is not finite is a gap.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over the steps of a run.

    Attributes:
        name: of the metric.
        steps: training steps, ascending  [points].
        values: at those steps; NaN and infinities as they were recorded  [points].
    """

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def last(self) -> float:
        """The newest value; NaN when there is none."""
        return self.values[-1] if self.values else math.nan

    @property
    def finite(self) -> list[tuple[int, float]]:
        """Steps and values that can be drawn."""
        return [(s, v) for s, v in zip(self.steps, self.values, strict=True) if math.isfinite(v)]

    def thinned(self, most: int) -> "Curve":
        """At most about so many points, evenly spaced, with the first and the last."""
        if len(self.steps) <= most:
            return self
        stride = math.ceil((len(self.steps) - 1) / max(1, most - 1))
        kept = [*range(0, len(self.steps) - 1, stride), len(self.steps) - 1]
        return Curve(self.name, tuple(self.steps[i] for i in kept), tuple(self.values[i] for i in kept))

    def pieces(self) -> Iterator[list[tuple[int, float]]]:
        """Stretches without a gap."""
        piece: list[tuple[int, float]] = []
        for step, value in zip(self.steps, self.values, strict=True):
            if math.isfinite(value):
                piece.append((step, value))
            elif piece:
                yield piece
                piece = []
        if piece:
            yield piece


@dataclass(frozen=True, slots=True)
class Range:
    """What an axis spans; never empty, so that everything on it has a place."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Range":
        """The range of some finite values, with room around a single one."""
        found = list(values)
        if not found:
            return cls(0.0, 1.0)
        low, high = min(found), max(found)
        if not math.isfinite(high - low):  # more than a float can hold
            return cls(low / 2, high / 2)
        if high - low <= 1e-9 * max(abs(low), abs(high)):  # what floats can hardly tell apart is no scale
            room = abs(low) * 0.1
            return cls(low - room, high + room) if room else cls(0.0, 1.0)
        return cls(low, high)

    def place(self, value: float) -> float:
        """Where a value lies, from 0 (low) to 1 (high)."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def short_number(value: float) -> str:
    """A number in few characters, for axes and tables."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    size = abs(value)
    if size and (size < 1e-3 or size >= 999_999.5):
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.3f}" if size < 10 else f"{value:.1f}" if size < 1000 else f"{value:,.0f}"


# -- in characters -------------------------------------------------------------------------------------

_BLOCKS = "▁▂▃▄▅▆▇█"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Braille: the bits of a character's dots, four rows of two."""


def spark(values: Iterable[float], width: int = 16) -> str:
    """A curve in one line of blocks; gaps are blanks."""
    numbers = list(values)
    numbers = list(Curve("", tuple(range(len(numbers))), tuple(numbers)).thinned(width).values)
    span = Range.of(v for v in numbers if math.isfinite(v))
    return "".join(_BLOCKS[round(span.place(v) * 7)] if math.isfinite(v) else " " for v in numbers)


def braille(curve: Curve, width: int, height: int) -> list[str]:
    """A curve as lines of braille, ``width`` by ``height`` characters, with neighbours joined."""
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]
    xs = Range.of(float(s) for s, _ in curve.finite)
    ys = Range.of(v for _, v in curve.finite)
    single = len(curve.finite) == 1

    def dot(x: int, y: int) -> None:
        row = rows - 1 - y
        cells[row // 4][x // 2] |= _DOTS[row % 4][x % 2]

    for piece in curve.pieces():
        placed = [
            (
                (columns - 1) // 2 if single else round(xs.place(s) * (columns - 1)),
                round(ys.place(v) * (rows - 1)),
            )
            for s, v in piece
        ]
        dot(*placed[0])
        for (x0, y0), (x1, y1) in pairwise(placed):
            reach = max(abs(x1 - x0), abs(y1 - y0), 1)
            for i in range(reach + 1):
                dot(round(x0 + (x1 - x0) * i / reach), round(y0 + (y1 - y0) * i / reach))
    return ["".join(chr(0x2800 + bits) for bits in row) for row in cells]
