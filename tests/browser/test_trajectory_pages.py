"""Pages of groups, trajectories and token trees in a real browser: clicks, keys, narrow screens, axe."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.branching_run import record, write_byte_tokenizer
from helpers.dashboard_server import Server
from helpers.synthetic_store import fill
from helpers.tab import Tab
from playwright.sync_api import Browser, Page, expect

from art_core.store import Store
from art_core.store.browse import TrajectoryFilter, list_trajectories
from art_core.types import Trajectory

OVERVIEWS = ("/trajectories", "/groups", "/groups?run_id=r-0001&policy_number=3")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    root = tmp_path_factory.mktemp("pages")
    with Store.open("live", root) as opened:
        fill(opened, run_count=3, rollouts=160, hostile=True, long_tokens=60_000)
        record(opened, scenarios=1, group_size=3, base_model=str(write_byte_tokenizer(root / "tokenizer")))
        yield opened


@pytest.fixture(scope="module")
def server(store: Store) -> Iterator[Server]:
    started = Server(Path(store.location).parent, control=True)
    yield started
    started.kill()


@pytest.fixture(scope="module")
def rollout(store: Store) -> Trajectory:
    """One of the branching agent's."""
    run = store.runs()[-1].id
    return store.trajectory(
        list_trajectories(store, TrajectoryFilter(run_id=run, order="oldest")).items[0].id
    )


@pytest.fixture
def page(chromium: Browser, server: Server) -> Iterator[Page]:
    tab = Tab(chromium, server.url)
    yield tab.page
    assert tab.close() == []


def test_from_a_list_to_a_rollout_and_on_to_its_neighbours(page: Page) -> None:
    page.goto("/trajectories")
    page.get_by_label("Order").select_option("best")
    page.locator("select[name=run_id]").select_option("r-0001")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url("**order=best**")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/trajectories/t-*")
    first = page.url
    page.get_by_role("link", name="Member after this one").or_(
        page.get_by_role("link", name="Member before this one")
    ).first.click()
    page.wait_for_url(lambda url: url != first)
    page.keyboard.press("u")
    page.wait_for_url("**/groups/g-*")


def test_tokens_come_when_asked_for_and_are_read_by_keys_in_three_colours(
    page: Page, rollout: Trajectory
) -> None:
    page.goto(f"/trajectories/{rollout.id}")
    view = page.locator(".token-view").first
    view.locator("summary").click()
    tokens = view.locator(".tokens")
    expect(tokens.locator(".tok")).to_have_count(len(rollout.steps[0].tokens.completion))  # type: ignore[union-attr]
    tokens.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("End")
    expect(view.locator(".told")).to_contain_text("not trained")
    for colour in ("advantage", "ratio", "logprob"):
        view.get_by_role("link", name=colour).click()
        expect(view.locator(".tokens-part")).to_have_attribute("data-colour", colour)
        expect(view.locator(f".for-{colour}")).to_be_visible()
    view.get_by_role("link", name="prompt").click()
    expect(view.locator(".tokens")).to_contain_text("<system>You plan.")


def test_a_node_of_the_graph_leads_to_each_of_its_visits_in_turn(page: Page, rollout: Trajectory) -> None:
    page.goto(f"/trajectories/{rollout.id}")
    node = page.locator(".graph a", has_text="search")
    visits = (node.get_attribute("data-visits") or "").split()
    assert len(visits) == 7
    for number in visits[:3]:
        node.click()
        page.wait_for_url(f"**#visit-{number}")
        expect(page.locator(f"#visit-{number}")).to_be_in_viewport()


def test_a_long_text_is_fetched_whole_where_it_stands(page: Page) -> None:
    page.goto("/trajectories/long-rollout")
    block = page.locator(".block.said .prose").first
    before = len(block.inner_text())
    block.locator("a.rest").click()
    expect(block.locator("a.rest")).to_have_count(0)
    assert len(block.inner_text()) > before


def test_thumbs_scores_and_choices_are_given_by_their_forms(
    page: Page, store: Store, rollout: Trajectory
) -> None:
    page.goto(f"/trajectories/{rollout.id}")
    page.get_by_label("Your name").fill("Ann")
    page.get_by_label("Comment").fill("<b>well</b> done")
    page.get_by_role("button", name="Thumb up").click()
    expect(page.locator(".feedback .said")).to_have_text("Kept: thumb up by Ann")
    page.get_by_label("Score, 0 to 1").fill("0.75")
    page.get_by_role("button", name="Give score").click()
    expect(page.locator(".feedback .said")).to_have_text("Kept: score 0.75 by Ann")
    page.reload()
    expect(page.locator("[data-feedback-list]")).to_contain_text("<b>well</b> done")
    page.goto(f"/groups/{rollout.group_id}")
    expect(page.get_by_label("Your name")).to_have_value("Ann")
    page.get_by_role("button", name="The second is better").click()
    expect(page.locator(".feedback .said")).to_have_text("Kept: a choice by Ann")
    kept = store.feedback()
    assert [(f.kind, f.value) for f in kept] == [("thumb", 1), ("score", 0.75), ("choice", 1)]
    assert kept[-1].over == rollout.id


def test_a_stretch_of_the_token_tree_is_read_by_keys(page: Page, rollout: Trajectory) -> None:
    page.goto(f"/groups/{rollout.group_id}/tree")
    page.locator(".token-tree a:has(.stretch)").nth(3).focus()
    page.keyboard.press("Enter")
    expect(page.locator("#stretch")).to_contain_text("Passing through:")
    expect(page.locator(".token-tree a.on")).to_have_count(1)


def paths(rollout: Trajectory) -> tuple[str, ...]:
    group = f"/groups/{rollout.group_id}"
    return (
        *OVERVIEWS,
        f"/trajectories/{rollout.id}",
        "/trajectories/long-rollout",
        "/groups/g-000003",
        group,
        f"{group}/tree",
        "/scenarios?scenario_id=tea-0",
        f"/trajectories/{rollout.id}/tokens?step={rollout.steps[0].id}",
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_and_use_the_pages(
    chromium: Browser, server: Server, rollout: Trajectory, scheme: Any
) -> None:
    """Axe finds nothing serious; it has to run its script, which the pages themselves forbid."""
    tab = Tab(chromium, server.url, color_scheme=scheme, bypass_csp=True)
    page = tab.page
    for path in paths(rollout):
        page.goto(path)
        for summary in page.locator(".token-view summary").all()[:1]:
            summary.click()
            expect(page.locator(".tokens").first).to_be_visible()
        assert tab.faults() == [], path
    assert tab.close() == []


def test_pages_fit_a_narrow_screen(chromium: Browser, server: Server, rollout: Trajectory) -> None:
    tab = Tab(chromium, server.url, viewport={"width": 360, "height": 780})
    for path in paths(rollout):
        tab.page.goto(path)
        assert tab.overflow() <= 0, path
    assert tab.close() == []
