"""Pages of a dashboard as texts: what a reader sees of them, the graphs that they draw, a store's rows."""

import html
import re

from fastapi.testclient import TestClient

from art_core.observe.dashboard.app import create_app
from art_core.store import Store
from art_core.store.browse import TrajectoryFilter, TrajectoryRow, list_trajectories

PART = {"X-ART-Part": "1"}


def client(store: Store, *, control: bool = False) -> TestClient:
    return TestClient(create_app(store, control=control))


def rows(store: Store, run: int) -> tuple[TrajectoryRow, ...]:
    run_id = store.runs()[run].id
    return list_trajectories(store, TrajectoryFilter(run_id=run_id, order="oldest")).items


def page(store: Store, address: str, **headers: str) -> str:
    answer = client(store).get(address, headers=headers)
    assert answer.status_code == 200, answer.text[-2000:]
    return answer.text


def states(text: str) -> dict[str, str]:
    """The state of each node of the graph that a page has drawn."""
    found = re.finditer(r'<g class="node \w+ (\w+)">.*?<title>([^:]+):', text)
    return {html.unescape(node[2]): node[1] for node in found}


def visible(text: str) -> str:
    """What a reader sees of a page, roughly."""
    return html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.S)))
