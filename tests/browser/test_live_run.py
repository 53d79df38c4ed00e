"""A real run, followed and steered from its page while it goes on, whatever dies meanwhile."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.dashboard_server import Server
from helpers.tab import Tab, busyness
from helpers.training_process import PROJECT, TrainingProcess
from playwright.sync_api import Browser, Page, expect

from art_core.store import Store

DELAY_MS = 2_000
"""Most that a page may lag behind what its run has recorded."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="module")
def run(root: Path) -> Iterator[TrainingProcess]:
    started = TrainingProcess(root)
    yield started
    started.kill()


@pytest.fixture(scope="module")
def server(run: TrainingProcess, root: Path) -> Iterator[Server]:
    started = Server(root, project=PROJECT, control=True)
    yield started
    started.kill()


def lag() -> float:
    return DELAY_MS * busyness()


def steps(page: Page) -> Any:
    return page.locator("#steps")


def points(page: Page) -> Any:
    figure = page.locator("figure", has=page.get_by_role("heading", name="Reward", exact=True))
    return figure.locator(".scatterlayer .trace path.point")


def test_each_step_of_a_run_is_on_its_page_within_two_seconds(
    chromium: Browser, server: Server, run: TrainingProcess
) -> None:
    before = run.reach(1)
    tab = Tab(chromium, server.url)
    tab.page.goto(f"/runs/{run.run_id}")
    expect(points(tab.page)).to_have_count(before)
    lags: list[float] = []
    for step in range(before + 1, before + 4):
        run.reach(step)
        recorded = time.monotonic()
        expect(steps(tab.page)).to_have_text(str(step))
        expect(points(tab.page)).to_have_count(step)
        lags.append(1000 * (time.monotonic() - recorded))
    assert statistics.median(lags) <= lag(), lags
    expect(tab.page.locator("#trajectories")).to_have_text(str(2 * (before + 3)))
    assert tab.close() == []


def test_a_browser_that_was_closed_shows_all_that_it_missed(
    chromium: Browser, server: Server, run: TrainingProcess
) -> None:
    before = run.reach(1)
    tab = Tab(chromium, server.url)
    tab.page.goto(f"/runs/{run.run_id}")
    expect(points(tab.page)).to_have_count(before)
    assert tab.close() == []
    run.reach(before + 2)
    again = Tab(chromium, server.url)
    again.page.goto(f"/runs/{run.run_id}")
    expect(points(again.page)).to_have_count(before + 2)
    assert again.close() == []


def test_an_open_page_outlives_its_server_and_misses_nothing(
    chromium: Browser, run: TrainingProcess, root: Path
) -> None:
    before = run.reach(1)
    first = Server(root, project=PROJECT)
    tab = Tab(chromium, first.url)
    tab.page.goto(f"/runs/{run.run_id}")
    expect(points(tab.page)).to_have_count(before)
    first.kill()
    expect(tab.page.locator("#connection")).to_contain_text("no connection")
    run.reach(before + 2)
    second = Server(root, first.port, project=PROJECT)
    try:
        expect(points(tab.page)).to_have_count(before + 2)  # by itself
        expect(tab.page.locator("#connection")).not_to_contain_text("no connection")
        run.reach(before + 3)
        expect(points(tab.page)).to_have_count(before + 3)
    finally:
        second.kill()
    refused = [c for c in tab.close() if "ERR_CONNECTION_REFUSED" not in c and "ERR_INCOMPLETE" not in c]
    assert refused == []  # nothing but that there was no server for a while


def test_a_knob_that_is_turned_on_the_page_is_what_the_run_trains_with(
    chromium: Browser, server: Server, run: TrainingProcess
) -> None:
    tab = Tab(chromium, server.url)
    page = tab.page
    page.goto(f"/runs/{run.run_id}")
    page.get_by_label("learning_rate", exact=True).fill("5e-3")
    page.get_by_role("button", name="Turn").click()
    expect(page.locator("#knobs-said")).to_contain_text("Turned")
    assert run.step()["learning_rate"] == 5e-3
    expect(page.locator("#turns li").first).to_contain_text("as configured → 0.005")
    assert tab.close() == []


def test_a_thumb_on_the_page_is_in_the_record_and_leaves_the_reward_alone(
    chromium: Browser, server: Server, run: TrainingProcess, root: Path
) -> None:
    run.reach(1)
    tab = Tab(chromium, server.url)
    page = tab.page
    page.goto(f"/trajectories?run_id={run.run_id}&order=best")
    page.locator("[data-item] a").first.click()
    page.wait_for_url("**/trajectories/t-*")
    page.get_by_label("Your name").fill("Ann")
    page.get_by_role("button", name="Thumb down").click()
    expect(page.locator(".feedback .said")).to_have_text("Kept: thumb down by Ann")
    with Store.open(PROJECT, root) as store:
        (kept,) = store.feedback(run_id=run.run_id)
        assert (kept.kind, kept.value, kept.author) == ("thumb", -1, "Ann")
        assert store.trajectory(kept.trajectory_id).reward == 1.0
    assert tab.close() == []


def test_the_end_of_a_run_is_seen_on_its_page(
    chromium: Browser, server: Server, run: TrainingProcess
) -> None:
    """The last test of this file: it ends the run that the others follow."""
    tab = Tab(chromium, server.url)
    tab.page.goto(f"/runs/{run.run_id}")
    expect(tab.page.locator("#state")).to_have_text("running")
    assert run.end() == 0
    expect(tab.page.locator("#state")).to_have_text("finished")
    assert tab.close() == []
