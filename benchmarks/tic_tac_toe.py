"""The demo for several seeds: does the agent learn, how much, and in what time?

    python benchmarks/tic_tac_toe.py --seeds 0 1 2

Runs examples/tic_tac_toe/demo.py once per seed and writes results/tic_tac_toe.json and the curves
docs/images/tic_tac_toe.png. Arguments after ``--`` go to the demo.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, when run as a script

from benchmarks.environment import environment, write_result
from examples.tic_tac_toe.display import Evaluation, TrainingStep, save_curves

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples/tic_tac_toe/demo.py"


def play(seed: int, options: list[str]) -> dict[str, Any]:
    """Run the demo once; its figures."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(DEMO), "--seed", str(seed), "--out", out, *options]
        subprocess.run(command, check=True)
        (result,) = Path(out).glob("*/result.json")
        return json.loads(result.read_text())


def rise(run: dict[str, Any], figure: str) -> float:
    """How a figure of the held-out games changed from the warm start to the end."""
    _, warm, trained = run["evaluations"]
    return trained[figure] - warm[figure]


def illegal_share(run: dict[str, Any]) -> float:
    """Games lost by an illegal move at the end, for each one after the warm start."""
    _, warm, trained = run["evaluations"]
    return trained["illegal_rate"] / warm["illegal_rate"]


def draw(runs: list[dict[str, Any]], images: Path) -> None:
    """One picture of all runs."""
    machine = environment()["hardware"]
    note = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, no GPU"
    curves = {
        f"seed {run['seed']}": (
            [TrainingStep(**step) for step in run["steps"]],
            [Evaluation(**evaluation) for evaluation in run["evaluations"]],
        )
        for run in runs
    }
    with tempfile.TemporaryDirectory() as scratch:
        png, _ = save_curves(curves, Path(scratch), note)
        images.mkdir(parents=True, exist_ok=True)
        (images / "tic_tac_toe.png").write_bytes(png.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options, demo_options = parser.parse_known_args()
    runs = [play(seed, [o for o in demo_options if o != "--"]) for seed in options.seeds]
    ratios = {
        "min_score_rise": min(rise(run, "score") for run in runs),
        "mean_score_rise": sum(rise(run, "score") for run in runs) / len(runs),
        "max_illegal_after_vs_warm_start": max(illegal_share(run) for run in runs),
        "max_minutes": max(run["seconds"] for run in runs) / 60,
    }
    draw(runs, ROOT / "docs/images")
    print(write_result("tic_tac_toe", {"runs": runs}, ratios))
    print(json.dumps(ratios, indent=1))


if __name__ == "__main__":
    main()
