"""The screenshots of ``docs/read-a-run.md``, from a store that the demo has written.

    python examples/tic_tac_toe/demo.py --steps 20 --opponents 4 --group-size 8 --warm-steps 10 \\
        --held-out 30 --set success_reward=1 --out SOMEWHERE
    python tests/helpers/docs_screenshots.py SOMEWHERE
"""

import argparse
import sys
from pathlib import Path

from playwright.sync_api import Locator, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, when run as a script
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.browser import ARGUMENTS, browser
from helpers.dashboard_server import Server
from helpers.tab import Tab

from art_core.store import Store
from art_core.store.browse import TrajectoryFilter, list_groups, list_trajectories

IMAGES = Path(__file__).resolve().parents[2] / "docs/images/dashboard"
PROJECT = "tic-tac-toe"
WINDOW = {"width": 1120, "height": 4_600}
MARGIN = 14


def crop(page: Page, name: str, first: Locator, last: Locator, most: int = 900) -> None:
    """What lies between the tops of two elements, the second one included, at most so many pixels."""
    above, below = first.bounding_box(), last.bounding_box()
    assert above is not None
    assert below is not None
    top = max(0.0, above["y"] - MARGIN)
    height = min(most, below["y"] + below["height"] + MARGIN - top)
    clip = {"x": 0, "y": top, "width": WINDOW["width"], "height": height}
    page.screenshot(path=IMAGES / f"{name}.png", clip=clip, animations="disabled")  # type: ignore[arg-type]
    print(f"{name}: {(IMAGES / f'{name}.png').stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", type=Path, help="where the demo's record is")
    root = parser.parse_args().root
    IMAGES.mkdir(parents=True, exist_ok=True)
    with Store.open(PROJECT, root) as store:
        run = store.runs()[-1].id
        groups = [g for g in list_groups(store, run, limit=500).items if g.size > 1]
        early = [g for g in groups if g.policy_numbers and g.policy_numbers[1] <= 3]
        group = max(early, key=lambda g: g.spread or 0.0)
        best = list_trajectories(store, TrajectoryFilter(group_id=group.id, order="best")).items[0]
        single = list_trajectories(store, TrajectoryFilter(run_id=run, order="oldest")).items[0]
    server = Server(root, project=PROJECT)
    try:
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=browser(), args=list(ARGUMENTS))
            tab = Tab(chromium, server.url, viewport=WINDOW)
            page = tab.page
            head, figures = page.locator("header.top"), page.locator("figure.chart")

            def go(path: str) -> None:
                page.goto(path)
                tab.settle()
                page.wait_for_load_state("networkidle")

            go("/")
            crop(page, "runs", head, page.locator("table"))
            go(f"/runs/{run}")
            figures.nth(6).locator(".main-svg").first.wait_for()
            crop(page, "run", head, figures.first)
            crop(page, "curves", figures.nth(1), figures.nth(6))
            time = page.locator("figure", has_text="Where the time goes")
            time.locator(".main-svg").first.wait_for()
            crop(page, "time", time, time)
            crop(page, "events", page.locator("#events-title"), page.locator("#events"))
            go(f"/trajectories?run_id={run}&order=worst")
            crop(page, "trajectories", head, page.locator("[data-item]").nth(7))
            go(f"/groups/{group.id}")
            crop(page, "group", head, page.locator(".members"))
            go(f"/trajectories/{best.id}")
            view = page.locator(".token-view").first
            view.locator("summary").click()
            view.get_by_role("link", name="advantage").click()
            view.locator(".for-advantage").wait_for()
            crop(page, "trajectory", head, page.locator(".visit, .conversation > section").nth(1), 860)
            go(f"/groups/{group.id}/tree")
            page.locator(".token-tree a:has(.stretch)").first.click()
            page.locator("#stretch", has_text="Passing through").wait_for()
            crop(page, "token-tree", head, page.locator("#stretch"), 940)
            go(f"/scenarios?scenario_id={single.scenario_id}")
            crop(page, "scenario", head, page.locator(".over-time"))
            go(f"/runs/{run}/audit")
            crop(page, "audit", head, page.locator(".findings"))
            assert tab.close() == []
            chromium.close()
    finally:
        server.kill()


if __name__ == "__main__":
    main()
