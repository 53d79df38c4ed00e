"""A run that goes on from another one: its curves are one, and the place of the restart is marked."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.trajectories import a_trajectory
from rich.console import Console
from starlette.testclient import TestClient
from typer.testing import CliRunner

from art_core.cli.app import app
from art_core.cli.watch import picture
from art_core.observe.dashboard.app import create_app
from art_core.observe.report import report_html
from art_core.observe.run_view import view_run
from art_core.store import RunState, Store
from art_core.types import PolicyVersion


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("p", tmp_path) as store:
        yield store


@pytest.fixture
def runs(store: Store) -> list[str]:
    """Three runs of one model, each going on from the one before; the last one has ended, too."""
    made: list[str] = []
    for place in range(3):
        run = store.begin_run("agent", {"seed": 1}, continues=made[-1] if made else None)
        for step in (2 * place + 1, 2 * place + 2):
            time.sleep(0.002)  # clocks may be coarse, and marks go by time
            store.log_metrics(run, step, {"reward_mean": step / 10, "policy_version": float(step)})
            store.save_trajectory(a_trajectory(f"t-{step}", reward=step / 10), run_id=run)
        store.add_event(run, "update_skipped", f"in run {place}")
        store.end_run(run, RunState.FAILED if place == 0 else RunState.FINISHED)
        made.append(run)
    # Numbers that were added after the restart, before its first step: they belong to the step before.
    store.log_metrics(made[1], 2, {"reward_mean": 0.25})
    return made


def test_a_view_has_the_curves_of_all_runs_and_marks_where_it_was_restarted(
    store: Store, runs: list[str]
) -> None:
    view = view_run(store, runs[2])
    assert view.curves["reward_mean"].steps == (1, 2, 3, 4, 5, 6)
    assert view.curves["reward_mean"].values == (0.1, 0.25, 0.3, 0.4, 0.5, 0.6)
    restarts = [mark for mark in view.marks() if "run_continued" in mark.text]
    assert [mark.step for mark in restarts] == [3, 5]
    assert [event.kind for event in view.events].count("update_skipped") == 3
    assert view.steps == 6
    assert view_run(store, runs[0]).curves["reward_mean"].steps == (1, 2)


def test_report_notebook_and_terminal_show_them_too(store: Store, runs: list[str], tmp_path: Path) -> None:
    document = report_html(store, runs[2])
    assert "0.100 to 0.600" in document
    assert document.count("goes on from run") >= 2
    assert f"goes on from run {runs[1]}" in view_run(store, runs[2])._repr_html_()
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(picture(view_run(store, runs[2]), 100, 30))
    said = console.export_text()
    assert "steps 1 to 6" in said
    assert "goes on from" in said
    listed = CliRunner().invoke(app, ["runs"], env={"ART_ROOT": str(tmp_path), "COLUMNS": "120"}).stdout
    assert "goes on from" in listed
    watched = CliRunner().invoke(app, ["watch"], env={"ART_ROOT": str(tmp_path), "COLUMNS": "120"}).stdout
    assert "step 6" in watched


def test_pages_join_them_and_lead_from_one_run_to_the_next(store: Store, runs: list[str]) -> None:
    client = TestClient(create_app(store))
    found = client.get(f"/runs/{runs[2]}/series?name=reward_mean").json()
    assert found["series"]["reward_mean"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert found["series"]["reward_mean"]["values"] == [0.1, 0.25, 0.3, 0.4, 0.5, 0.6]
    assert found["started_at"] == store.runs()[0].started_at
    page = client.get(f"/runs/{runs[1]}").text
    assert f'goes on from <a class="mono" href="/runs/{runs[0]}">' in page
    assert f'went on as <a class="mono" href="/runs/{runs[2]}">' in page
    assert '<span id="steps">4</span>' in page
    assert '<span class="kind warn"><bdi>run_continued</bdi></span>' in page
    assert page.count("update_skipped") == 2
    listed = re.sub(r"<[^>]+>", "", client.get("/").text)
    assert f"goes on from {runs[1]}" in listed
    assert f"went on as {runs[2]}" in listed
    compared = client.get(f"/compare?run={runs[0]}&run={runs[2]}").text
    assert "0.600" in compared
    assert client.get(f"/runs/{runs[0]}/series?name=reward_mean").json()["series"]["reward_mean"][
        "steps"
    ] == [
        1,
        2,
    ]


def test_a_step_of_an_earlier_run_leads_to_the_rollouts_of_that_run(store: Store, runs: list[str]) -> None:
    rollout = a_trajectory("t-new", reward=0.5)
    store.save_trajectory(rollout, run_id=runs[0])
    store.add_version(PolicyVersion("agent", 1), run_id=runs[0])
    client = TestClient(create_app(store))
    found = client.get(f"/runs/{runs[2]}/step?step=1&show=best", follow_redirects=False).headers["location"]
    assert f"run_id={runs[0]}" in found
    found = client.get(f"/runs/{runs[2]}/step?step=3&show=best", follow_redirects=False).headers["location"]
    assert f"run_id={runs[1]}" in found
    assert "policy_number=2" in found, "the version that was served after the step before, of the run before"
