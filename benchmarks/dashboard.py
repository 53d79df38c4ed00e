"""How long the dashboard's pages take on a project of 200 runs and 100,000 rollouts.

    python benchmarks/dashboard.py

Makes such a store (`tests/helpers/synthetic_store.py`), serves it in a process of its own, and asks for every
kind of page: how long the server takes, and when a browser shows the first content (first contentful paint;
where there is a Chromium). Writes ``benchmarks/results/dashboard.json``.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.browser import ARGUMENTS, browser
from helpers.dashboard_server import Server
from helpers.synthetic_store import fill
from playwright.sync_api import sync_playwright

from art_core.store import Store
from benchmarks.environment import write_result

PAGES = {
    "runs": "/",
    "run": "/runs/r-0196",
    "compare 8 runs": "/compare?" + "&".join(f"run=r-{n:04}" for n in range(8)),
    "groups": "/groups",
    "groups of a step": "/groups?run_id=r-0100&policy_number=7",
    "groups with a failure": "/groups?cause=timeout",
    "groups that teach nothing": "/groups?spread=none",
    "trajectories": "/trajectories",
    "best of a step": "/trajectories?run_id=r-0100&policy_number=7&order=best",
    "worst of all": "/trajectories?order=worst",
    "of a node": "/trajectories?node=search",
    "failed": "/trajectories?status=failed",
    "trajectory": "/trajectories/t-0050000",
    "trajectory of 60,000 tokens": "/trajectories/long-rollout",
    "group": "/groups/g-006000",
    "token tree": "/groups/g-006000/tree",
    "scenario over time": "/scenarios?scenario_id=question-003",
}
"""One of each kind, and the filters that people use."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--root", type=Path, help="a directory that holds, or is to hold, the store")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = options.root or Path(scratch)
        made = _make(root, options.runs, options.rollouts)
        server = Server(root, project="pages")
        try:
            figures = _measure(server, options.repetitions)
        finally:
            server.kill()
    for name, figure in figures.items():
        print(f"{name:30}" + "".join(f"  {key} {value:8.1f}" for key, value in figure.items()))
    sizes = {"runs": options.runs, "rollouts": options.rollouts, "long_rollout_tokens": 60_000}
    slowest = max(
        max(figure.get("first_content_ms", 0.0), figure["median_ms"]) for figure in figures.values()
    )
    raw = {
        "store": sizes,
        "seconds_to_make_it": made,
        "load_average": os.getloadavg(),  # what else the machine was busy with
        "pages": figures,
    }
    write_result("dashboard", raw, {"slowest_page_to_one_second": round(slowest / 1000, 3)})


def _make(root: Path, runs: int, rollouts: int) -> float | None:
    if (root / "pages.db").exists():
        return None
    began = time.perf_counter()
    with Store.open("pages", root) as store:
        fill(store, run_count=runs, rollouts=rollouts, long_tokens=60_000)
    return round(time.perf_counter() - began, 1)


def _measure(server: Server, repetitions: int) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for name, path in PAGES.items():
            times: list[float] = []
            for _ in range(repetitions + 1):
                began = time.perf_counter()
                answer = client.get(path)
                times.append((time.perf_counter() - began) * 1000)
                answer.raise_for_status()
            figures[name] = {
                "first_ms": round(times[0], 1),
                "median_ms": round(statistics.median(times[1:]), 1),
                "kilobytes": round(len(answer.content) / 1000, 1),
            }
    found = browser()
    if found is None:
        return figures
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=list(ARGUMENTS))
        for name, path in PAGES.items():
            paints = [_first_paint(chromium, server.url + path) for _ in range(repetitions)]
            figures[name]["first_content_ms"] = round(statistics.median(paints), 1)
        chromium.close()
    return figures


def _first_paint(chromium: Any, url: str) -> float:
    """Milliseconds until a new browser profile shows the first content of a page."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(url)
    script = """() => new Promise((resolve) => {
        const look = () => {
            const [paint] = performance.getEntriesByName("first-contentful-paint");
            paint ? resolve(paint.startTime) : requestAnimationFrame(look);
        };
        look();
    })"""
    painted = page.evaluate(script)
    context.close()
    return painted


if __name__ == "__main__":
    main()
