"""The report of a run, as somebody without this software opens it."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.browser import ADVICE, ARGUMENTS, browser
from helpers.html_page import Page
from helpers.synthetic_store import HOSTILE, fill
from helpers.trajectories import a_step, a_trajectory

from art_core.errors import StoreError, UnknownRunError
from art_core.observe.machine import environment, in_words
from art_core.observe.report import report_html, write_report
from art_core.observe.report.examples import changes, extremes
from art_core.store import Store
from art_core.types import PolicyVersion, Scenario


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("p", tmp_path / "art") as store:
        yield store


def learned(store: Store, run: str, name: str, version: int, scenario: str, reward: float, said: str) -> None:
    step = a_step(
        name, policy=PolicyVersion("agent", version), response={"role": "assistant", "content": said}
    )
    made = replace(a_trajectory(name, scenario=Scenario(scenario), reward=reward), steps=(step,))
    store.save_trajectory(made, run_id=run)


def test_a_report_shows_the_same_scenario_under_the_first_and_the_last_version(store: Store) -> None:
    run = store.begin_run("agent", {"train": {"loss": "grpo"}, "seed": 7})
    for version, rewards in ((0, (0.0, 0.1, 0.2)), (3, (0.4, 0.5, 0.6)), (9, (0.8, 0.9, 1.0))):
        for reward in rewards:
            learned(store, run, f"t-{version}-{reward}", version, "both", reward, f"said {version} {reward}")
    learned(store, run, "t-only", 9, "late", 0.3, "a scenario that only the last version met")
    (change,) = changes(store, run, 3)
    assert change.scenario_id == "both"
    assert (change.before.number, change.after.number) == (0, 9)
    assert change.before.mean == pytest.approx(0.1)
    assert (change.before.typical.reward, change.after.typical.reward) == (0.1, 0.9)
    first, last = extremes(store, run)
    assert (first.number, first.best.reward, first.worst.reward) == (0, 0.2, 0.0)
    assert (last.number, last.best.reward, last.worst.reward) == (9, 1.0, 0.3)
    shown = Page(report_html(store, run)).text
    assert shown.index("said 0 0.1") < shown.index("said 9 0.9")
    assert "train.loss grpo" in shown
    assert not changes(store, run, 0)


def test_scenarios_that_were_met_furthest_apart_come_first_then_those_that_changed_most(store: Store) -> None:
    run = store.begin_run("agent", {})
    for scenario, first, last, gain in (
        ("near", 4, 5, 0.9),
        ("far", 0, 9, 0.1),
        ("far and better", 0, 9, 0.5),
    ):
        learned(store, run, f"{scenario}-before", first, scenario, 0.1, "no")
        learned(store, run, f"{scenario}-after", last, scenario, 0.1 + gain, "yes")
    assert [c.scenario_id for c in changes(store, run, 2)] == ["far and better", "far"]


def test_a_report_says_what_happened_and_where(store: Store) -> None:
    run = store.begin_run("agent", {"learning_rate": 1e-5})
    where = environment()
    store.add_event(run, "environment", in_words(where), where)
    store.log_metrics(
        run, 1, {"reward_mean": 0.25, "time/train": 3.0, "time/rollout": 9.0, "time/step": 12.0}
    )
    store.add_event(run, "update_skipped", "its KL was 2.0")
    store.log_metrics(run, 2, {"reward_mean": 0.75, "my/own": 3.5, "time/train": 3.0, "time/rollout": 9.0})
    store.end_run(run)
    document = report_html(store, run)
    shown = Page(document).text
    assert "mean reward 0.250 to 0.750" in shown
    assert "update_skipped its KL was 2.0" in shown
    assert f"versions.python {where['versions']['python']}" in shown
    assert "learning_rate 1e-05" in shown
    assert "my/own" in shown
    assert "rollout 9 s" in shown
    assert "train: 3 s (25%)" in document
    assert "stroke-dasharray" in document, "the event is a mark in the curves"


@pytest.mark.parametrize("config", [{}, {"a": [], "b": None, "c": {"d": {}}}])
def test_a_run_without_anything_has_a_report_too(store: Store, config: dict[str, object]) -> None:
    run = store.begin_run("agent", config)
    shown = Page(report_html(store, run)).text
    assert "No training step was recorded" in shown


def test_untrusted_text_is_text_in_a_report(store: Store) -> None:
    fill(store, run_count=2, rollouts=32, train_steps=4, hostile=True)
    run = store.begin_run(HOSTILE[0], {HOSTILE[1]: HOSTILE, "long": HOSTILE[5]})
    for version in (0, 1):
        learned(store, run, f"t-{version}", version, HOSTILE[version], 0.5, "".join(HOSTILE))
        learned(store, run, f"u-{version}", version, "".join(HOSTILE[:5]), 0.5, HOSTILE[0])
        store.score(f"u-{version}", 0.5, author=HOSTILE[0], explanation=HOSTILE[1])
        store.log_metrics(
            run, version, {HOSTILE[0]: 0.5, HOSTILE[2]: float("inf"), f"time/{HOSTILE[1]}": 1.0}
        )
        store.add_event(run, HOSTILE[1], HOSTILE[version])
    for run_id in (run, "r-0000"):
        document = report_html(store, run_id)
        page = Page(document)
        page.check_harmless()
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", document)
        assert len(document) < 2_000_000
        assert "url(" not in document
        document.encode()


def test_a_report_opens_in_a_browser_without_a_network_and_without_a_complaint(
    store: Store, tmp_path: Path
) -> None:
    if (executable := browser()) is None:
        pytest.skip(ADVICE)
    from playwright.sync_api import sync_playwright

    (run,) = fill(store, run_count=1, rollouts=32, train_steps=8, hostile=True)
    path = write_report(store, run, tmp_path / "report.html")
    said: list[str] = []
    asked: list[str] = []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=list(ARGUMENTS))
        for scheme, width in (("light", 1200), ("dark", 390)):
            context = chromium.new_context(
                offline=True, color_scheme=scheme, viewport={"width": width, "height": 800}
            )
            page = context.new_page()
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            page.goto(path.as_uri())
            assert page.title() == "<script>document.title='owned'</script>, run r-0000"
            assert page.locator("svg[role=img]").count() > 5
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.get_by_role("link", name="Events").click()
            assert page.locator("#events").is_visible()
        chromium.close()
    assert not said
    assert {url.partition("#")[0] for url in asked} == {path.as_uri()}


def test_a_report_is_written_whole_or_not_at_all(store: Store, tmp_path: Path) -> None:
    run = store.begin_run("agent", {})
    there = tmp_path / "there.html"
    there.write_text("kept")
    with pytest.raises(StoreError, match="cannot be written"):
        write_report(store, run, there / "inside.html")
    assert there.read_text() == "kept"
    with pytest.raises(UnknownRunError, match="nothing"):
        write_report(store, "nothing", there)
    assert there.read_text() == "kept"
    write_report(store, run, there)
    assert there.read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["art", "there.html"]
