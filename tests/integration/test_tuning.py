"""The tuning benchmark, small: real runs of the demo with a tiny random model."""

import json
import subprocess
import sys
from pathlib import Path

from helpers.tiny import tiny_model

ROOT = Path(__file__).parents[2]
SMALL = ("--opponents", "2", "--group-size", "4", "--steps", "1", "--warm-steps", "1", "--held-out", "2")


def test_variants_are_run_merged_and_told_apart_from_what_failed(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")

    def tune(*options: str) -> tuple[dict, str]:
        done = subprocess.run(
            [
                sys.executable,
                str(ROOT / "benchmarks/tuning.py"),
                "--json",
                str(tmp_path / "out.json"),
                *options,
            ],
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "out.json").read_text()), done.stdout

    tune("--variants", "base", "--at-once", "1", "--", "--model", str(tmp_path / "nowhere"), *SMALL)
    result, printed = tune(
        *("--variants", "gspo", "--merge", "--at-once", "1", "--", "--model", str(model), *SMALL)
    )
    broken, gspo = result["raw"]["runs"]
    assert "nowhere" in broken["log"]
    assert gspo["exit"] == 0
    assert gspo["after"]["games"] == 2
    assert len(gspo["steps"]) == 1
    assert result["ratios"] == {}
    assert "no figures" in printed
    _, shown = tune("--show")
    assert shown.count("loss=gspo") == 1
    assert "base" not in shown
