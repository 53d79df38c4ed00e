"""The tuning benchmark, small: real runs of the demo with a tiny random model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.tiny import tiny_model

ROOT = Path(__file__).parents[2]
TOOL = (sys.executable, str(ROOT / "benchmarks/tuning.py"), "--cpu", "--json", "out.json")
SMALL = ("--opponents", "2", "--group-size", "4", "--warm-steps", "1", "--held-out", "2")


def tune(place: Path, *options: str) -> tuple[dict, str]:
    """One call of the tool to its end: what it wrote and what it said."""
    done = subprocess.run([*TOOL, *options], cwd=place, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads((place / "out.json").read_text()), done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, and with the figures of one run that failed and of one that did not."""
    place = tmp_path_factory.mktemp("tuning")
    tiny_model(place / "model")
    tune(place, "--variants", "base", "--seeds", "0", "--", "--model", "nowhere", *SMALL)
    only = ("--variants", "gspo", "--seeds", "0", "--merge")
    tune(place, *only, "--", "--model", "model", *SMALL, "--steps", "1")
    return place


def test_variants_are_run_merged_and_told_apart_from_what_failed(place: Path) -> None:
    result, shown = tune(place, "--show")
    broken, gspo = result["raw"]["runs"]
    assert "nowhere" in broken["log"]
    assert gspo["exit"] == 0
    assert gspo["after"]["games"] == 2
    assert gspo["options"]["steps"] == 1
    assert len(gspo["steps"]) == 1
    assert result["ratios"] == {}
    assert shown.count("loss=gspo") == 1
    assert "| nothing |" not in shown


def test_the_figures_of_another_form_are_not_mixed_in(place: Path) -> None:
    before = (place / "out.json").read_bytes()
    mixed = [o for o in TOOL if o != "--cpu"]
    done = subprocess.run([*mixed, "--merge"], cwd=place, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "out.json holds runs of the cpu form, not gpu" in done.stderr
    assert (place / "out.json").read_bytes() == before


def test_a_call_that_is_ended_keeps_whole_runs_and_what_the_others_had(place: Path) -> None:
    """The rest is made up for by the next call, which leaves what is there alone."""
    (scratch := place / "scratch").mkdir()
    only = ("--missing", "--variants", "gspo", "dapo", "--seeds", "0", "--at-once", "2")
    tool = subprocess.Popen(
        [*TOOL, *only, "--", "--model", "model", *SMALL, "--steps", "1000000"],
        cwd=place,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    while not list(scratch.glob("*/*/*/result.json")):
        assert tool.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    tool.send_signal(signal.SIGTERM)
    tool.communicate(timeout=60)
    assert tool.returncode == 130
    assert not list(scratch.glob("*/*"))
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(scratch) in said(p)]
    by_variant = {r["variant"]: r for r in json.loads((place / "out.json").read_text())["raw"]["runs"]}
    assert by_variant["gspo"]["after"]["games"] == 2
    assert by_variant["dapo"]["after"] is None
    assert by_variant["dapo"]["steps"]


def said(cmdline: Path) -> str:
    """A process's command line; nothing when it ended meanwhile."""
    try:
        return cmdline.read_bytes().decode(errors="replace")
    except OSError:
        return ""
