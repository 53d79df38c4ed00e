"""Numbers for people: as short as they can be without saying something else.

Invariant: a number that is absent is an en dash, never 0.
"""

import math


def number(value: float | None, digits: int = 3) -> str:
    """A number for people: ``0.482``, ``12,300``, ``3.1e-05``; an en dash for none."""
    if value is None:
        return "\u2013"
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "\u2212∞"}.get(value, "NaN")
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", "\u2212")
    size = abs(value)
    if size >= 1000:
        written = f"{value:,.0f}"
    elif size >= 1e-3:
        written = f"{value:.{max(0, digits - max(0, math.floor(math.log10(size)) + 1))}f}"
    else:
        written = f"{value:.{digits - 1}e}"
    return written.replace("-", "\u2212", 1) if value < 0 else written


def duration(seconds: float | None) -> str:
    """Seconds for people: ``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 05 min``, ``3 d 4 h``."""
    if seconds is None or not math.isfinite(seconds):
        return "\u2013"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
