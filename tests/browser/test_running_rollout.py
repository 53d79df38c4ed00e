"""The page of a rollout that is still running shows what it does as it is recorded."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.dashboard_server import Server
from helpers.tab import Tab, busyness
from helpers.trajectories import a_step
from playwright.sync_api import Browser, expect

from art_core.recording import Rollout
from art_core.store import Store
from art_core.types import Scenario, StepIdentity


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("live", tmp_path) as store:
        yield store


@pytest.fixture
def server(store: Store, tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path)
    yield started
    started.kill()


def call(rollout: Rollout, number: int) -> None:
    rollout.record(
        a_step(
            rollout.id,
            number,
            started_at=time.time(),
            response={"role": "assistant", "content": f"this is move {number}"},
            identity=StepIdentity(node=f"player{number}", namespace=f"player{number}:{number}"),
        )
    )


def test_calls_appear_as_they_are_made_and_what_is_unfolded_stays_so(
    chromium: Browser, server: Server, store: Store
) -> None:
    rollout = Rollout(Scenario("board"), sink=store.sink(store.begin_run("agent")))
    tab = Tab(chromium, server.url)
    page = tab.page
    page.goto(f"/trajectories/{rollout.id}")
    expect(page.get_by_text("Nothing was captured.")).to_be_visible()
    lags: list[float] = []

    def move(number: int) -> None:
        call(rollout, number)
        recorded = time.monotonic()
        expect(page.get_by_text(f"this is move {number}")).to_be_visible()
        lags.append(time.monotonic() - recorded)

    move(1)
    expect(page.get_by_text("Nothing was captured.")).to_have_count(0)
    page.locator(".visit .token-view summary").click()
    expect(page.locator(".visit .token-view .tokens")).to_be_visible()
    page.evaluate("document.activeElement.blur()")
    for number in (2, 3):
        move(number)
        expect(page.locator(".visit")).to_have_count(number)
    expect(page.locator("#facts")).to_contain_text("3 calls")
    expect(page.locator(".visit .token-view .tokens")).to_have_count(1)
    expect(page.locator("#way a[data-visits]")).to_have_count(3)
    rollout.finish(0.75)
    expect(page.locator("#facts")).to_contain_text("finished")
    expect(page.locator("#rewards")).to_contain_text("0.750")
    assert statistics.median(lags) <= 2 * busyness(), lags
    assert tab.close() == []


def test_a_page_that_was_away_shows_all_that_it_missed(
    chromium: Browser, server: Server, store: Store, tmp_path: Path
) -> None:
    rollout = Rollout(Scenario("board"), sink=store.sink(store.begin_run("agent")))
    call(rollout, 1)
    tab = Tab(chromium, server.url)
    tab.page.goto(f"/trajectories/{rollout.id}")
    expect(tab.page.get_by_text("this is move 1")).to_be_visible()
    server.kill()
    expect(tab.page.locator("#connection")).to_have_text("no connection; trying again")
    call(rollout, 2)
    rollout.finish(0.5)
    second = Server(tmp_path, server.port)
    try:
        expect(tab.page.get_by_text("this is move 2")).to_be_visible()
        expect(tab.page.locator("#facts")).to_contain_text("finished")
        expect(tab.page.locator("#connection")).to_be_empty()
    finally:
        second.kill()
    tab.close()
