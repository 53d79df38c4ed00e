"""What stands out in a run is said in the same words wherever somebody looks."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.html_page import Page
from rich.console import Console
from starlette.testclient import TestClient
from typer.testing import CliRunner

from art_core.cli.app import app
from art_core.cli.watch import picture
from art_core.observe.dashboard.app import create_app
from art_core.observe.report import report_html
from art_core.observe.run_view import view_run
from art_core.store import Store

SAID = (
    "It learns. The mean reward rose from 0.100 to 0.580 over 15 steps.",
    "Most groups teach nothing. In the last steps 35 of 40 groups had equal rewards",
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("live", tmp_path) as opened:
        yield opened


@pytest.fixture
def run(store: Store) -> str:
    run = store.begin_run("agent", {})
    for step in range(1, 16):
        teach = {"groups": 8.0, "groups_without_spread": 7.0}
        store.log_metrics(run, step, {"reward_mean": 0.06 + 0.04 * (step - 1), **teach})
    store.end_run(run)
    return run


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def test_commands_say_it(store: Store, run: str, tmp_path: Path) -> None:
    environment = {"ART_ROOT": str(tmp_path), "COLUMNS": "80"}
    for arguments in (["runs", "last"], ["watch"]):
        told = CliRunner().invoke(app, arguments, env=environment)
        assert told.exit_code == 0
        assert all(said in in_one_line(told.stdout) for said in SAID), told.stdout
    shown = Console(width=80, color_system=None)
    with shown.capture() as captured:
        shown.print(picture(view_run(store, run), 80, 24))
    assert captured.get().splitlines()[1].strip() == "It learns.  Most groups teach nothing."


def test_reports_and_notebooks_say_it(store: Store, run: str) -> None:
    view = view_run(store, run)
    for document in (report_html(store, run), view._repr_html_()):
        assert all(said in Page(document).text for said in SAID)
    assert [(sign.tone, sign.about) for sign in view.signs()] == [
        ("good", "reward_mean"),
        ("warn", "groups_without_spread"),
    ]


def test_the_page_of_a_run_says_it(store: Store, run: str) -> None:
    page = TestClient(create_app(store)).get(f"/runs/{run}").text
    shown = in_one_line(re.sub("<[^>]*>", "", page))
    assert all(said in shown for said in SAID)
    assert f'<a href="/groups?run_id={run}&amp;spread=none">These groups</a>' in page
