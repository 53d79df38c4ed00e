"""Every page of a recorded run of the demo, walked through with mouse and keys: 20 steps of a real model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.dashboard_server import Server
from helpers.demo_recording import PROJECT, unpack
from helpers.tab import PHONE, Tab
from playwright.sync_api import Browser, Page, expect

from art_core.store import Store
from art_core.store.browse import TrajectoryFilter, list_groups, list_trajectories

STEPS = 21
"""The warm start, and 20 of GRPO."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    unpack(directory)
    return directory


@pytest.fixture(scope="module")
def store(root: Path) -> Iterator[Store]:
    with Store.open(PROJECT, root) as opened:
        yield opened


@pytest.fixture(scope="module")
def run_id(store: Store) -> str:
    return store.runs()[-1].id


@pytest.fixture(scope="module")
def server(store: Store, root: Path) -> Iterator[Server]:
    started = Server(root, project=PROJECT)
    yield started
    started.kill()


@pytest.fixture(scope="module")
def paths(store: Store, run_id: str) -> dict[str, str]:
    """One page of each kind, by its name."""
    groups = list_groups(store, run_id, limit=500).items
    group = max((g for g in groups if g.size == 8), key=lambda g: g.spread or 0.0)
    best = list_trajectories(store, TrajectoryFilter(group_id=group.id, order="best")).items[0]
    return {
        "runs": "/",
        "run": f"/runs/{run_id}",
        "compare": f"/compare?run={run_id}",
        "audit": f"/runs/{run_id}/audit",
        "groups": f"/groups?run_id={run_id}",
        "group": f"/groups/{group.id}",
        "token tree": f"/groups/{group.id}/tree",
        "trajectories": f"/trajectories?run_id={run_id}&order=worst",
        "trajectory": f"/trajectories/{best.id}",
        "request": f"/trajectories/{best.id}/request?step={store.trajectory(best.id).steps[0].id}",
        "scenario": f"/scenarios?scenario_id={best.scenario_id}",
        "not found": "/runs/r-nowhere",
    }


@pytest.fixture
def tab(chromium: Browser, server: Server) -> Iterator[Tab]:
    made = Tab(chromium, server.url)
    yield made
    assert made.close() == []


def drawn_points(page: Page, title: str) -> Any:
    figure = page.locator("figure", has=page.get_by_role("heading", name=title, exact=True))
    return figure.locator(".scatterlayer .trace path.point")


def test_from_the_list_of_runs_to_the_tokens_of_its_best_game_by_mouse(tab: Tab) -> None:
    page = tab.page
    page.goto("/")
    page.locator("#runs a").first.click()
    page.wait_for_url("**/runs/r-*")
    expect(page.locator("#steps")).to_have_text(str(STEPS))
    expect(page.locator("#state")).to_have_text("finished")
    expect(drawn_points(page, "Reward")).not_to_have_count(0)
    # The page of a run knows each step's rollouts.
    page.get_by_label("Rollouts of step").fill("20")
    page.get_by_role("button", name="Best", exact=True).click()
    page.wait_for_url("**/trajectories?*order=best*")
    page.locator("[data-item] a").first.click()
    page.wait_for_url("**/trajectories/t-*")
    expect(page.get_by_role("heading", name="Way through the graph")).to_be_visible()
    page.locator(".token-view summary").first.click()
    expect(page.locator(".tokens .tok").first).to_be_visible()
    page.get_by_role("link", name="advantage").first.click()
    expect(page.locator(".tokens-part").first).to_have_attribute("data-colour", "advantage")
    page.get_by_role("link", name="Same scenario over time").click()
    page.wait_for_url("**/scenarios?*")
    page.go_back()
    page.locator("nav.crumbs a[data-up]").click()
    page.wait_for_url("**/groups/*")
    expect(page.locator(".member")).to_have_count(8)
    page.get_by_role("link", name="Token tree").click()
    page.wait_for_url("**/tree")
    page.locator(".token-tree a:has(.stretch)").first.click()
    expect(page.locator("#stretch")).to_contain_text("Passing through:")
    page.get_by_role("link", name="Runs", exact=True).first.click()
    page.locator("#runs a").first.click()
    page.get_by_role("link", name="Audit rewards").click()
    page.wait_for_url("**/audit")
    tab.settle()
    expect(page.get_by_role("heading", name="Checks")).to_be_visible()


def test_everything_can_be_reached_and_read_without_a_mouse(tab: Tab) -> None:
    page, keys = tab.page, tab.page.keyboard
    page.goto("/")
    keys.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    keys.press("Enter")
    keys.press("Tab")
    expect(page.locator("main :focus")).to_have_count(1)
    page.evaluate("document.activeElement.blur()")
    for press, shown in (("?", True), ("Escape", False)):
        keys.press(press)
        expect(page.get_by_role("dialog")).to_be_visible(visible=shown)
    page.evaluate("document.activeElement.blur()")
    keys.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    keys.type("player")
    expect(page.locator("#runs tr:visible")).to_have_count(1)
    keys.press("Escape")
    keys.press("j")
    keys.press("Enter")
    page.wait_for_url("**/runs/r-*")
    check_focus(page)
    page.get_by_role("link", name="Groups", exact=True).last.focus()
    keys.press("Enter")
    page.wait_for_url("**/groups?*")
    check_focus(page)
    page.evaluate("document.activeElement.blur()")
    keys.press("j")
    keys.press("j")
    keys.press("Enter")
    page.wait_for_url("**/groups/*")
    check_focus(page)
    page.evaluate("document.activeElement.blur()")
    keys.press("j")
    keys.press("Enter")
    page.wait_for_url("**/trajectories/*")
    check_focus(page)
    page.evaluate("document.activeElement.blur()")
    for place in ("**/groups/*", "**/groups?*"):
        keys.press("u")
        page.wait_for_url(place)


def check_focus(page: Page, most: int = 40) -> None:
    """Tab goes through what can be used in the order in which it stands, and shows where it is."""
    page.evaluate("scrollTo(0, 0); document.activeElement.blur()")
    before, visited = -1, 0
    for _ in range(most):
        page.keyboard.press("Tab")
        at = page.evaluate("""() => {
            const now = document.activeElement;
            if (now === document.body) return null;
            const all = [...document.querySelectorAll("*")];
            const style = getComputedStyle(now), box = now.getBoundingClientRect();
            const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
            const drawn = now.closest("svg") !== null;
            return {place: all.indexOf(now), seen: ring || drawn, size: box.width * box.height,
                    what: now.outerHTML.slice(0, 120)};
        }""")
        if at is None:
            break
        assert at["place"] > before, at
        assert at["seen"], at
        assert at["size"] > 0, at
        before, visited = at["place"], visited + 1
    assert visited >= 6


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_and_use_every_page(
    chromium: Browser, server: Server, paths: dict[str, str], screenshots: Path, scheme: Any
) -> None:
    """Axe runs a script of its own, which the pages forbid: this is the only test that lets it."""
    tab = Tab(chromium, server.url, color_scheme=scheme, bypass_csp=True)
    for name, path in paths.items():
        tab.page.goto(path)
        tab.settle()
        for folded in tab.page.locator(".token-view summary").all()[:1]:
            folded.click()
            expect(tab.page.locator(".tokens .tok").first).to_be_visible()
        assert tab.faults() == [], name
        tab.picture(screenshots, f"{name} {scheme}")
    assert [c for c in tab.close() if "404" not in c] == []


def test_every_page_fits_a_phone(
    chromium: Browser, server: Server, paths: dict[str, str], screenshots: Path
) -> None:
    tab = Tab(chromium, server.url, viewport=PHONE, has_touch=True)
    for name, path in paths.items():
        tab.page.goto(path)
        tab.settle()
        assert tab.overflow() <= 0, name
        tab.picture(screenshots, f"{name} phone")
    assert [c for c in tab.close() if "404" not in c] == []


@pytest.mark.parametrize("name", ["runs", "groups", "trajectories", "audit"])
def test_on_a_phone_nothing_of_a_list_has_to_be_scrolled_to_the_side(
    chromium: Browser, server: Server, paths: dict[str, str], name: str
) -> None:
    tab = Tab(chromium, server.url, viewport=PHONE, has_touch=True)
    tab.page.goto(paths[name])
    tab.settle()
    lists = tab.page.locator(".scroll:has(table.cards)")
    assert lists.evaluate_all("all => all.map((one) => one.scrollWidth - one.clientWidth)") == [0]
    cells = lists.locator("tbody tr").first.locator("th, td")
    within = "all => all.every((c) => !c.textContent.trim() || c.getBoundingClientRect().width > 0)"
    assert cells.evaluate_all(within)
    assert tab.close() == []


def test_a_read_only_page_has_no_form_that_writes_and_its_server_hears_none(
    tab: Tab, run_id: str, paths: dict[str, str], store: Store
) -> None:
    for name in ("run", "trajectory", "group"):
        tab.page.goto(paths[name])
        methods = tab.page.locator("form").evaluate_all("all => all.map((f) => f.method)")
        assert set(methods) <= {"get", "dialog"}, name
        expect(tab.page.locator("[data-feedback], #knobs, [data-token]")).to_have_count(0)
    request = tab.context.request
    best = paths["trajectory"].removeprefix("/trajectories/")
    given = {"trajectory_id": best, "kind": "thumb", "value": 1, "author": "Ann"}
    assert request.post("/feedback", data=given).status == 403
    assert request.post(f"/runs/{run_id}/knobs", data={"learning_rate": 1e-5}).status == 403
    for path in paths.values():
        assert request.post(path).status == 405, path
        assert request.delete(path).status == 405, path
    assert store.feedback() == []
