"""Page: what every page of the dashboard is made with.

Invariant: values are escaped by the templates themselves, and text that a run recorded passes through the
filter ``text`` (or `shown`), so that it can neither reorder its surroundings nor fill the page.

A handler asks `site_of(request)` for the store, and hands a template and its values to `render`.
"""

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
from art_core.views.numbers import duration, number
from art_core.views.text import short_id, shown

HERE = Path(__file__).parent


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
