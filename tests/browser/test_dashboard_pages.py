"""The pages of runs in a real browser: drawn, followed, driven by keys, readable by everybody."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.dashboard_server import Server
from helpers.synthetic_store import fill
from helpers.tab import Tab
from helpers.trajectories import a_trajectory
from playwright.sync_api import Browser, Page, expect

from art_core.store import Store


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def store(root: Path) -> Iterator[Store]:
    with Store.open("live", root) as opened:
        fill(opened, run_count=4, rollouts=80)
        yield opened


@pytest.fixture(scope="module")
def server(store: Store, root: Path) -> Iterator[Server]:
    started = Server(root, control=True)
    yield started
    started.kill()


@pytest.fixture
def tab(chromium: Browser, server: Server) -> Iterator[Tab]:
    made = Tab(chromium, server.url)
    yield made
    assert made.close() == []


def drawn(page: Page, title: str) -> Any:
    """The points of a chart's line, as Plotly has drawn them."""
    figure = page.locator("figure", has=page.get_by_role("heading", name=title, exact=True))
    return figure.locator(".scatterlayer .trace path.point")


def begin(store: Store, directory: Path) -> str:
    process = {"host": socket.gethostname(), "pid": os.getpid()}
    return store.begin_run("agent", {"process": process, "checkpoints": str(directory)})


def test_a_run_is_drawn_from_its_first_step_on_while_it_goes_on(tab: Tab, store: Store, root: Path) -> None:
    run = begin(store, root)
    tab.page.goto(f"/runs/{run}")
    expect(tab.page.get_by_text("No training step yet.")).to_be_visible()
    for step in range(1, 4):
        store.log_metrics(run, step, {"reward_mean": step / 10, "loss": 1.0, "time/train": 2.0})
        expect(drawn(tab.page, "Reward")).to_have_count(step)
    expect(tab.page.locator("#steps")).to_have_text("3")
    store.add_event(run, "update_skipped", "<b>its norm</b> is too high")
    expect(tab.page.locator("#events .said").first).to_have_text("<b>its norm</b> is too high")
    expect(drawn(tab.page, "Reward")).to_have_count(3 + 1)  # the event has a mark
    bars = tab.page.locator("figure", has_text="Where the time goes").locator(".bars .point")
    bars.first.scroll_into_view_if_needed()
    expect(bars).to_have_count(3)
    store.log_metrics(run, 3, {"reward_mean": 0.9})  # again: the page begins anew, by itself
    expect(tab.page.locator("figure").first.locator(".last")).to_have_text("0.900")
    store.end_run(run)
    expect(tab.page.locator("#state")).to_have_text("finished")


def test_what_stands_out_is_said_while_a_run_goes_on(tab: Tab, store: Store, root: Path) -> None:
    run = begin(store, root)
    store.log_metrics(run, 1, {"reward_mean": 0.0, "updates_skipped": 0.0})
    tab.page.goto(f"/runs/{run}")
    signs = tab.page.locator("#signs .notice")
    expect(tab.page.locator("#steps")).to_have_text("1")
    expect(signs).to_have_count(0)
    for step in range(2, 9):
        store.log_metrics(run, step, {"reward_mean": step / 10, "updates_skipped": float(step == 8)})
    expect(signs).to_have_count(2)
    expect(signs.first).to_have_text("It learns. The mean reward rose from 0.167 to 0.700 over 8 steps.")
    expect(signs.first).to_have_class("notice good")
    way = signs.nth(1).get_by_role("link", name="Events")
    way.focus()
    store.add_event(run, "checkpoint", "kept")
    expect(tab.page.locator("#events li")).to_have_count(1)
    expect(way).to_be_focused()  # what is said is the same
    store.add_event(run, "training_stopped", "<b>its KL</b> is too high")
    expect(signs.first).to_have_text("Training was stopped. <b>its KL</b> is too high")
    expect(signs).to_have_count(3)
    store.end_run(run)


def test_an_axis_of_tiny_numbers_can_be_read(tab: Tab) -> None:
    tab.page.goto("/runs/r-0000")

    def ticks(title: str) -> list[str]:
        figure = tab.page.locator("figure", has=tab.page.get_by_role("heading", name=title, exact=True))
        figure.scroll_into_view_if_needed()
        expect(figure.locator(".ytick").first).to_be_visible()
        return figure.locator(".ytick").all_text_contents()

    assert "1e\N{MINUS SIGN}5" in ticks("Learning rate")
    assert all("e" not in tick and len(tick) <= 5 for tick in ticks("Reward"))


def test_folded_metrics_are_drawn_when_they_are_opened(tab: Tab) -> None:
    tab.page.goto("/runs/r-0000")
    tab.page.get_by_text("All other metrics").click()
    last = tab.page.locator("details.more figure").first
    last.scroll_into_view_if_needed()
    expect(last.locator(".scatterlayer path.point")).to_have_count(20 + 4)  # steps and events


def test_runs_are_selected_and_compared_by_keys(tab: Tab) -> None:
    page = tab.page
    page.goto("/")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("agent-1")
    expect(page.locator("#runs tr:visible")).to_have_count(1)
    page.keyboard.press("Control+a")
    page.keyboard.press("Delete")
    page.keyboard.press("Escape")
    for _ in range(2):
        page.keyboard.press("j")
        page.keyboard.press("x")
    expect(page.locator("#chosen-count")).to_have_text("2 selected")
    page.keyboard.press("c")
    page.wait_for_url("**/compare?run=*&run=*")
    expect(page.locator("figure").first.locator(".scatterlayer path.js-line")).to_have_count(2)
    page.locator("[data-show]").first.uncheck()
    expect(page.locator("figure").first.locator(".scatterlayer path.js-line")).to_have_count(1)
    page.get_by_label("Across").select_option("time")
    page.keyboard.press("Escape")
    page.locator("body").click(position={"x": 2, "y": 2})
    page.keyboard.press("u")
    page.wait_for_url("**/")


def test_runs_that_are_compared_while_they_go_on_are_followed(tab: Tab, store: Store, root: Path) -> None:
    one, other = begin(store, root), begin(store, root)
    for run in (one, other):
        for step in (1, 2):
            store.log_metrics(run, step, {"reward_mean": step / 10})
    tab.page.goto(f"/compare?run={one}&run={other}")
    row = tab.page.locator(f"[data-run={one}]")
    expect(row).to_contain_text("0.200")
    expect(tab.page.locator("figure").first.locator(".scatterlayer path.js-line")).to_have_count(2)
    before = tab.page.locator("figure").first.locator(".scatterlayer path.js-line").first.get_attribute("d")
    store.log_metrics(one, 3, {"reward_mean": 0.75})
    store.end_run(one)
    expect(row.locator("[data-state]")).to_have_text("finished")
    expect(row).to_contain_text("0.750")
    line = tab.page.locator("figure").first.locator(".scatterlayer path.js-line").first
    expect(line).not_to_have_attribute("d", before or "")
    store.end_run(other)


def test_the_list_of_runs_follows_what_becomes_of_each(tab: Tab, store: Store, root: Path) -> None:
    run = begin(store, root)
    tab.page.goto("/")
    row = tab.page.locator(f"#run-{run}")
    expect(row).to_contain_text("running")
    store.log_metrics(run, 1, {"reward_mean": 0.625})  # as a rule before the page looks for the first time
    store.end_run(run)
    expect(row).to_contain_text("finished")
    expect(row).to_contain_text("0.625")


def test_a_knob_is_turned_by_its_form(chromium: Browser, server: Server, store: Store, root: Path) -> None:
    tab = Tab(chromium, server.url)
    page = tab.page
    directory = root / "checkpoints"
    directory.mkdir()
    page.goto(f"/runs/{begin(store, directory)}")
    page.get_by_label("learning_rate").fill("-1")
    page.get_by_role("button", name="Turn").click()
    expect(page.locator("#wrong-learning_rate")).to_contain_text("greater than 0")
    expect(page.get_by_label("learning_rate")).to_be_focused()
    assert not (directory / "knobs.json").exists()
    page.get_by_label("learning_rate").fill("2e-5")
    page.get_by_role("button", name="Turn").click()
    expect(page.locator("#knobs-said")).to_contain_text("Turned")
    assert '"learning_rate": 2e-05' in (directory / "knobs.json").read_text()
    tab.close()


def test_a_weight_of_the_reward_is_turned_by_its_field(
    chromium: Browser, server: Server, store: Store, root: Path
) -> None:
    tab = Tab(chromium, server.url)
    page, directory = tab.page, root / "weights"
    directory.mkdir()
    run = begin(store, directory)
    recorded = {"weight/it's right": 1.0, "weight/steps": -0.1}
    scored = a_trajectory(
        "weighed", reward=0.5, components={"it's right": 1.0, "steps": 5.0}, metrics=recorded
    )
    store.save_trajectory(scored, run_id=run)
    page.goto(f"/runs/{run}")
    field = page.get_by_label("reward_weights/steps")
    expect(field).to_have_attribute("placeholder", "-0.1")
    field.fill("few")
    page.get_by_role("button", name="Turn").click()
    expect(page.locator(".knob", has=field).locator(".wrong")).to_contain_text("valid number")
    expect(field).to_be_focused()
    field.fill("-0.25")
    page.get_by_label("reward_weights/it's right").fill("2")
    page.get_by_label("temperature", exact=True).fill("0.5")
    page.get_by_role("button", name="Turn").click()
    expect(page.locator("#knobs-said")).to_contain_text("Turned")
    turned = {"temperature": 0.5, "reward_weights": {"steps": -0.25, "it's right": 2.0}}
    assert json.loads((directory / "knobs.json").read_text()) == turned
    data = {"name": "reward_weights/it's right", "before": 2.0, "after": None}
    store.add_event(run, "knob_turned", "as a run records it", data)
    expect(page.locator("#turns li").first).to_contain_text("2 → as scored", timeout=30_000)
    expect(page.get_by_label("reward_weights/it's right")).to_have_value("")
    expect(field).to_have_value("-0.25")
    store.end_run(run)
    assert [entry for entry in tab.close() if "422" not in entry] == []  # that one turn was refused


PATHS = ("/", "/runs/r-0000", "/compare?run=r-0000&run=r-0001", "/runs/r-0000/audit", "/nowhere")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_and_use_the_pages(chromium: Browser, server: Server, scheme: Any) -> None:
    """Axe finds nothing serious; it has to run its script, which the pages themselves forbid."""
    tab = Tab(chromium, server.url, color_scheme=scheme, bypass_csp=True)
    for path in PATHS:
        tab.page.goto(path)
        expect(tab.page.locator("[data-working]")).to_have_count(0)
        if tab.page.locator("figure .plot").count():
            expect(tab.page.locator("figure .scatterlayer").first).to_be_visible()
        assert tab.faults() == [], path
    tab.close()


def test_pages_fit_a_narrow_screen(chromium: Browser, server: Server) -> None:
    tab = Tab(chromium, server.url, viewport={"width": 360, "height": 780})
    for path in PATHS:
        tab.page.goto(path)
        assert tab.overflow() <= 0, path
    tab.close()


def test_a_theme_that_was_chosen_stays(tab: Tab) -> None:
    tab.page.goto("/")
    tab.page.keyboard.press("t")
    tab.page.keyboard.press("t")
    assert tab.page.evaluate("document.documentElement.dataset.theme") == "dark"
    tab.page.goto("/runs/r-0000")
    assert tab.page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
