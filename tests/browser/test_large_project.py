"""Pages of a large project: 200 runs, 100,000 rollouts, and one of 60,000 tokens."""

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.dashboard_server import Server
from helpers.synthetic_store import fill
from helpers.tab import Tab, busyness
from playwright.sync_api import Browser, expect

from art_core.store import Store
from benchmarks.dashboard import PAGES

LIMIT_MS = 1000.0
"""Most time to first content on a quiet machine."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("large")
    with Store.open("large", root) as store:
        fill(store, run_count=200, rollouts=100_000, long_tokens=60_000)
        started = Server(root, project="large")
        yield started
        started.kill()
    Path(store.location).unlink()  # 600 MB, which pytest would keep


def test_every_page_shows_something_within_a_second(
    chromium: Browser, server: Server, screenshots: Path
) -> None:
    """Median of three visits, each by a new profile.

    Twice the limit passes, times how busy the machine is, since other tests run beside this one;
    `benchmarks/dashboard.py` says what a quiet machine takes.
    """
    slow: dict[str, list[float]] = {}
    for name, path in PAGES.items():
        times: list[float] = []
        for visit in range(3):
            tab = Tab(chromium, server.url)
            times.append(tab.first_content(path))
            if visit == 0:
                tab.page.screenshot(path=screenshots / f"large-{name.replace(' ', '-').replace(',', '')}.png")
            assert tab.close() == [], name
            if visit == 0 and times[0] <= LIMIT_MS / 2:
                break  # two more would not change the verdict
        if statistics.median(times) > LIMIT_MS * 2 * busyness():
            slow[name] = times
    assert not slow


def test_among_two_hundred_runs_one_is_found_by_its_name(chromium: Browser, server: Server) -> None:
    tab = Tab(chromium, server.url)
    page = tab.page
    page.goto("/")
    expect(page.locator("#runs tr")).to_have_count(200)
    page.keyboard.press("/")
    page.keyboard.type("r-0042")
    expect(page.locator("#runs tr:visible")).to_have_count(1)
    page.keyboard.press("Enter")
    page.get_by_role("link", name="agent-2").locator("visible=true").click()
    page.wait_for_url("**/runs/r-0042")
    assert tab.close() == []


def test_a_list_of_a_hundred_thousand_is_turned_page_by_page(chromium: Browser, server: Server) -> None:
    tab = Tab(chromium, server.url)
    page = tab.page
    page.goto("/trajectories?order=worst")
    seen: set[str] = set()
    for _ in range(3):
        rows = page.locator("[data-item] th a:first-child").evaluate_all("all => all.map((a) => a.href)")
        assert len(rows) == 50
        assert not seen & set(rows)
        seen |= set(rows)
        here = page.url
        page.get_by_role("link", name="Next").click()
        page.wait_for_url(lambda url, here=here: url != here)
    assert tab.close() == []


def test_sixty_thousand_tokens_are_read_a_page_at_a_time(chromium: Browser, server: Server) -> None:
    tab = Tab(chromium, server.url)
    page = tab.page
    page.goto("/trajectories/long-rollout")
    view = page.locator(".token-view").first
    view.locator("summary").click()
    expect(view.locator(".tok").first).to_be_visible()
    assert page.locator(".tok").count() < 5_000  # of 60,000
    assert tab.close() == []
