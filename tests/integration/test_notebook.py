"""What people see in a notebook; and the demo's notebook, run by a real kernel on what the demo recorded."""

import math
import os
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from helpers.html_page import Page
from helpers.synthetic_store import HOSTILE, fill
from helpers.tiny import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from nbclient import NotebookClient

from art_core.observe.report import report_html
from art_core.observe.run_view import view_run
from art_core.store import Store
from art_core.views.curves import Curve, Range, braille, short_number, spark
from art_core.views.svg import Mark, chart

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/tic_tac_toe/read_a_run.ipynb"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open("p", tmp_path) as store:
        yield store


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the demo leaves, with a tiny random model."""
    out = tmp_path_factory.mktemp("demo")
    model = tiny_model(out / "model", hidden=256)
    small = {"steps": 2, "warm-steps": 4, "opponents": 2, "group-size": 4, "held-out": 2}
    options = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    demo = str(ROOT / "examples/tic_tac_toe/demo.py")
    done = subprocess.run(
        [sys.executable, demo, "--model", str(model), "--out", str(out), *options],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_notebook_reads_what_the_demo_recorded(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ART_ROOT", str(recorded))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    shown = [
        output.get("data", {}).get("text/html", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    assert any("<svg" in html and "reward_mean" in html for html in shown), "the run's curves"
    assert sum("<details" in html for html in shown) >= 3, "trajectories and a group, to unfold"
    assert (recorded / "report.html").stat().st_size > 10_000


def test_the_demos_record_says_where_it_ran_and_where_its_time_went(recorded: Path) -> None:
    with Store.open("tic-tac-toe", recorded) as store:
        view = view_run(store)
        document = report_html(store, view.run.id)
    page = Page(document)
    page.check_harmless()
    assert f"versions.python {platform.python_version()}" in page.text
    assert "hardware.cores" in page.text
    assert "Time of the last step" in page.text
    assert f"mean reward {short_number(view.curves['reward_mean'].values[0])} to" in page.text
    assert "best: " in page.text
    assert "player" in page.text


# -- a run ---------------------------------------------------------------------------------------------


def test_a_run_is_shown_as_curves_that_are_well_formed_and_load_nothing(store: Store) -> None:
    (run,) = fill(store, run_count=1, rollouts=16, train_steps=12)
    html = view_run(store, run)._repr_html_()
    for drawn in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ET.fromstring(drawn)
    assert html.count("<svg") == len(view_run(store, run).curves)
    assert "Mean reward of the rollouts" in html, "what it measures is said where it is pointed at"
    Page(html).check_harmless()


def test_untrusted_text_is_text_in_a_notebook(store: Store) -> None:
    fill(store, run_count=2, rollouts=16, train_steps=3, hostile=True)
    run = store.begin_run(HOSTILE[0], {})
    for text in HOSTILE:
        store.log_metrics(run, 1, {text[:1000]: 0.5})
        store.add_event(run, text, text)
    for run_id in (run, "r-0000", "r-0001"):
        html = view_run(store, run_id)._repr_html_()
        Page(html).check_harmless()
        assert not re.search(r"[\x1b\u202a-\u202e]", html)
        assert len(html) < 500_000
        for drawn in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
            ET.fromstring(drawn)


# -- curves ----------------------------------------------------------------------------------------------

numbers = st.floats() | st.sampled_from([0.0, 1e-300, 1e308, -1e308, math.nan, math.inf])
curves = st.lists(st.tuples(st.integers(0, 10**6), numbers), max_size=60, unique_by=lambda p: p[0]).map(
    lambda points: (
        Curve("m", *map(tuple, zip(*sorted(points), strict=True))) if points else Curve("m", (), ())
    )
)


@given(curves, st.integers(0, 10**6))
def test_any_numbers_can_be_drawn(curve: Curve, at: int) -> None:
    drawn = chart(curve, marks=[Mark(at, "<b>")])
    root = ET.fromstring(drawn)
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 320
            assert 0 <= y <= 150
    lines = braille(curve, 20, 3)
    assert [len(line) for line in lines] == [20] * 3
    assert any(c != "\u2800" for line in lines for c in line) == bool(curve.finite)
    assert len(spark(curve.values, 10)) <= 11
    for value in curve.values:
        assert len(short_number(value)) <= 9


@given(curves, st.integers(2, 30))
def test_thinning_keeps_the_ends_and_invents_nothing(curve: Curve, most: int) -> None:
    thin = curve.thinned(most)
    points = list(zip(curve.steps, map(repr, curve.values), strict=True))
    kept = list(zip(thin.steps, map(repr, thin.values), strict=True))
    assert len(kept) <= max(most + 1, 2)
    assert set(kept) <= set(points)
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])


def test_a_rising_curve_rises_and_a_gap_stays_one() -> None:
    curve = Curve("m", (1, 2, 3, 4, 5), (0.0, 1.0, math.nan, 2.0, 3.0))
    assert [len(piece) for piece in curve.pieces()] == [2, 2]
    assert spark(curve.values) == "▁▃ ▆█"
    first, *_, last = braille(Curve("m", (1, 2), (0.0, 1.0)), 4, 2)
    assert first[-1] != "\u2800"
    assert last[0] != "\u2800"
    assert first[0] == last[-1] == "\u2800"
    assert Range.of([2.0, 2.0]).place(2.0) == pytest.approx(0.5)
