"""How far a run's page is behind the run, while `make demo` goes on.

    make demo &
    python benchmarks/dashboard_live.py

Waits for a run to begin, serves the dashboard in a process of its own, opens the run's page in a browser and
notes when each step appears there: the delay is counted from when the step was in the store. Ends with the
run and writes ``benchmarks/results/dashboard_live.json``.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.browser import ARGUMENTS, browser
from helpers.dashboard_server import Server
from playwright.sync_api import Page, sync_playwright

from art_core.store import Store
from art_core.store.records import Run, RunState
from benchmarks.environment import write_result

NOTE = """addEventListener("DOMContentLoaded", () => {
    const steps = document.querySelector("#steps");
    const look = () => {
        const shown = JSON.parse(localStorage.shown ?? "{}");
        shown[steps.textContent] ??= Date.now() / 1000;
        localStorage.shown = JSON.stringify(shown);
    };
    new MutationObserver(look).observe(steps, {childList: true, characterData: true, subtree: true});
    look();
});"""
"""Notes when each number of steps was first shown, in Unix seconds; also when the page loads itself again."""

PATIENCE = 900.0
"""Seconds until a run has to begin."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(".art"))
    parser.add_argument("--project", default="tic-tac-toe")
    options = parser.parse_args()
    began = time.time()
    with Store.open(options.project, options.root) as store:
        run = awaited(store, began)
        server = Server(options.root, project=options.project)
        try:
            with sync_playwright() as playwright:
                chromium = playwright.chromium.launch(executable_path=browser(), args=list(ARGUMENTS))
                page = chromium.new_page()
                page.add_init_script(NOTE)
                page.goto(f"{server.url}/runs/{run.id}")
                opened = time.time()
                shown = watched(store, run, page)
                chromium.close()
        finally:
            server.interrupt()
        delays = measured(store, run, shown, opened)
    print("seconds from the store to the page:", ", ".join(f"{d:.2f}" for d in delays))
    worst = max(delays)
    raw = {"steps": len(delays), "median_seconds": statistics.median(delays), "most_seconds": worst}
    write_result("dashboard_live", raw | {"seconds": delays}, {"most_to_two_seconds": worst / 2})


def awaited(store: Store, since: float) -> Run:
    """A run that begins from now on."""
    while time.time() < since + PATIENCE:
        for run in store.runs():
            if run.started_at > since:
                return run
        time.sleep(0.5)
    raise SystemExit(f"no run began within {PATIENCE:g} s; start `make demo` beside this")


def watched(store: Store, run: Run, page: Page) -> dict[str, float]:
    """When each number of steps was first shown, once the run has ended."""
    while next(r for r in store.runs() if r.id == run.id).state is RunState.RUNNING:
        page.wait_for_timeout(500)
    page.wait_for_timeout(5_000)
    shown: dict[str, Any] = page.evaluate("JSON.parse(localStorage.shown)")
    return shown


def measured(store: Store, run: Run, shown: dict[str, float], opened: float) -> list[float]:
    """How long after it was in the store each step was shown, of those that came while somebody looked."""
    recorded: dict[int, float] = {}
    for metric in store.metrics(run.id):
        recorded[metric.step] = min(metric.created_at, recorded.get(metric.step, metric.created_at))
    missing = [step for step, at in recorded.items() if at > opened and str(step) not in shown]
    if missing:
        raise SystemExit(f"steps {missing} were never shown")
    return [shown[str(step)] - at for step, at in sorted(recorded.items()) if at > opened]


if __name__ == "__main__":
    main()
