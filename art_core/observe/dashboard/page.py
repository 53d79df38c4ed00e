"""Page: what every page of the dashboard is made with.

Invariant: values are escaped by the templates themselves, and text that a run recorded passes through the
filter ``text`` (or `shown`), so that it can neither reorder its surroundings nor fill the page.

A handler asks `site_of(request)` for the store, and hands a template and its values to `render`.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from art_core.store import Store
from art_core.views.text import safe, short_id, shorten

HERE = Path(__file__).parent

TEXT_LIMIT = 300
"""Most characters of a recorded text that the filter ``text`` shows, unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Site:
    """What the pages have in common.

    Attributes:
        store: what they show.
        control: whether knobs can be turned.
        token: what a request that changes something has to bring along.
        templates: theirs.
    """

    store: Store
    control: bool
    token: str
    templates: Environment = field(repr=False)


def site_of(request: Request) -> Site:
    """The site that a request came to."""
    return request.app.state.site


def render(request: Request, template: str, *, status_code: int = 200, **values: Any) -> HTMLResponse:
    """A template as a page.

    Args:
        request: what asked for it.
        template: a file of ``templates/``; it extends ``base.html``.
        status_code: of HTTP.
        **values: what the template reads. ``site``, ``path``, ``project`` and ``static`` are there, too.
    """
    site = site_of(request)
    common = {
        "site": site,
        "project": site.store.project,
        "path": request.url.path,
        "static": static_url,
    }
    html = site.templates.get_template(template).render(common | values)
    return HTMLResponse(html, status_code=status_code)


def make_templates() -> Environment:
    """The templates with their filters: text, number, duration, moment, ago, query, short (an id)."""
    environment = Environment(
        loader=PackageLoader("art_core.observe.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "text": shown,
        "number": number,
        "duration": duration,
        "moment": moment,
        "ago": ago,
        "query": query,
        "urlencode": lambda name: quote(str(name), safe=""),  # a slash of an id is none of its address
        "short": lambda name: shown(short_id(str(name)), 40),
    }
    return environment


def shown(text: object, limit: int = TEXT_LIMIT) -> str:
    """Recorded text without control and bidirectional characters, its middle left out where it is long."""
    # Shortened first, with room for what `safe` takes out: a line of megabytes is not gone through.
    return shorten(safe(shorten(str(text), limit * 4)), limit)


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


def moment(seconds: float | None) -> str:
    """A Unix time as ISO 8601 in UTC; the page's script shows it in the reader's zone."""
    if seconds is None:
        return "\u2013"
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g}"


def ago(seconds: float | None) -> str:
    """How long ago a Unix time was."""
    return "\u2013" if seconds is None else duration(max(0.0, time.time() - seconds))


def query(values: Mapping[str, Any]) -> str:
    """The part of an address behind ``?``; what is None is left out."""
    return urlencode({k: v for k, v in values.items() if v is not None}, doseq=True)


def static_url(name: str) -> str:
    """Where a file of ``static/`` is served; the address changes with its content."""
    return f"/static/{name}?v={_digest(name)}"


def plotly_url() -> str:
    """Where Plotly's script is served, by its version."""
    return f"/vendor/plotly.min.js?v={version('plotly')}"


_digests: dict[tuple[str, int], str] = {}


def _digest(name: str) -> str:
    path = HERE / "static" / name
    key = name, path.stat().st_mtime_ns
    if key not in _digests:
        _digests[key] = blake2b(path.read_bytes(), digest_size=6).hexdigest()
    return _digests[key]
