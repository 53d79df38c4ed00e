"""What each choice of algorithm does to the tic-tac-toe agent: one run of the demo for each.

    python benchmarks/tuning.py --gpus 4 --minutes 9 --json tuning.json -- --model DIR --engine vllm ...

Every variant is the base's options with one thing changed. Runs are dealt over the GPUs, a few at a time on
each; when the time is up, those that still run are ended and keep the figures that they had. Results of
several calls may be merged into one file (``--merge``). Arguments after ``--`` go to every run of the demo.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, when run as a script

from benchmarks.environment import environment

DEMO = Path(__file__).resolve().parents[1] / "examples/tic_tac_toe/demo.py"
BASE = (
    *("--mixed-opponents", "--opponents", "64", "--group-size", "16", "--steps", "22", "--warm-steps", "40"),
    *("--evaluate", "greedy", "--held-out", "500", "--token-budget", "8192"),
    *("--set", "epochs=4", "--set", "entropy_target=0.15"),
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "base": (),
    "dr_grpo": ("--set", "loss=dr_grpo"),
    "dapo": ("--set", "loss=dapo"),
    "gspo": ("--set", "loss=gspo"),
    "cispo": ("--set", "loss=cispo"),
    "mean": ("--set", "advantage=mean"),
    "leave_one_out": ("--set", "advantage=leave_one_out"),
    "no_entropy_target": ("--set", "entropy_target=null"),
    "one_update": ("--set", "epochs=1"),
    "two_updates": ("--set", "epochs=2"),
    "rate_1e-4": ("--learning-rate", "1e-4"),
    "rate_5e-4": ("--learning-rate", "5e-4"),
    "groups_of_8": ("--opponents", "128", "--group-size", "8"),
    "groups_of_64": ("--opponents", "16", "--group-size", "64"),
    "quarter_batch": ("--opponents", "16"),
    "groups_by_opponent": ("--no-mixed-opponents",),
    "rank_4": ("--lora-rank", "4"),
    "clip_0.4": ("--set", "clip_low=0.4", "--set", "clip_high=0.4"),
}


@dataclass
class Run:
    """One run of the demo, begun."""

    variant: str
    seed: int
    gpu: int | None
    out: Path
    process: subprocess.Popen[bytes]

    def result(self) -> dict[str, Any] | None:
        """Its figures so far; None before the first step."""
        written = sorted(self.out.glob("*/result.json"))
        return json.loads(written[-1].read_text()) if written else None

    def end(self) -> None:
        """End it with everything that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)


def begin(variant: str, seed: int, gpu: int | None, out: Path, given: list[str]) -> Run:
    """Start a run in a process group of its own, its output in a file."""
    out.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        str(DEMO),
        *BASE,
        "--seed",
        str(seed),
        "--out",
        str(out),
        *given,
        *VARIANTS[variant],
    ]
    shown = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    with (out / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **shown}, start_new_session=True
        )
    return Run(variant, seed, gpu, out, process)


def play(options: argparse.Namespace, out: Path, given: list[str]) -> list[dict[str, Any]]:
    """All runs, as many at a time as there is room for; what each came to."""
    deadline = time.monotonic() + 60 * options.minutes
    waiting = [(variant, seed) for seed in options.seeds for variant in options.variants]
    places: list[int | None] = [*range(options.gpus)] * options.at_once or [None] * options.at_once
    running: list[Run] = []
    ended: list[Run] = []
    try:
        while (waiting or running) and time.monotonic() < deadline:
            for run in [r for r in running if r.process.poll() is not None]:
                running.remove(run)
                ended.append(run)
                places.append(run.gpu)
            while waiting and places:
                variant, seed = waiting.pop(0)
                running.append(begin(variant, seed, places.pop(0), out / f"{variant}-{seed}", given))
            time.sleep(1)
    finally:
        for run in running:
            run.end()
    for variant, seed in waiting:
        print(f"{variant}, seed {seed}: not begun, the time was up")
    return [summary(run) for run in (*ended, *running)]


def summary(run: Run) -> dict[str, Any]:
    """A run's figures; the end of its log where it has none."""
    result = run.result()
    found: dict[str, Any] = {"variant": run.variant, "seed": run.seed, "exit": run.process.returncode}
    if result is None:
        return {**found, "log": (run.out / "log.txt").read_text(errors="replace")[-2000:]}
    return found | {name: result[name] for name in ("seconds", "before", "after", "steps")}


def table(runs: list[dict[str, Any]]) -> str:
    """One line for each run."""
    lines = [f"{'variant':20} seed  won before  won after  illegal  reward  entropy  steps  minutes"]
    for run in runs:
        if "steps" not in run:
            lines.append(f"{run['variant']:20} {run['seed']:4}  no figures: {run['log'][-80:]!r}")
            continue
        after, last = run["after"], run["steps"][-1]
        rates = () if after is None else (after["win_rate"], after["illegal_rate"])
        won = "{:9.1%} {:8.1%}".format(*rates) if rates else "        -        -"
        entropy = "-" if last["entropy"] is None else f"{last['entropy']:.2f}"
        lines.append(
            f"{run['variant']:20} {run['seed']:4} {run['before']['win_rate']:11.1%} {won}"
            f" {last['reward']:7.3f} {entropy:>8} {len(run['steps']):6} {run['seconds'] / 60:8.1f}"
        )
    return "\n".join(lines)


def markdown(runs: list[dict[str, Any]]) -> str:
    """The runs that came to an end, as a table of the docs, the best first."""
    lines = ["| changed | seed | won before | won after | illegal | entropy at the end | minutes |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    ended = [run for run in runs if run.get("after")]
    for run in sorted(ended, key=lambda run: -run["after"]["win_rate"]):
        after, last = run["after"], run["steps"][-1]
        changed = " ".join(VARIANTS[run["variant"]]).replace("--set ", "") or "nothing"
        entropy = "" if last["entropy"] is None else f"{last['entropy']:.2f}"
        lines.append(
            f"| `{changed}` | {run['seed']} | {run['before']['win_rate']:.1%} | {after['win_rate']:.1%} "
            f"| {after['illegal_rate']:.1%} | {entropy} | {run['seconds'] / 60:.1f} |"
        )
    return "\n".join(lines)


def ratios(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Share of held-out games won at the end, against the base's, seeds averaged."""
    won: dict[str, list[float]] = {}
    for run in runs:
        if run.get("after"):
            won.setdefault(run["variant"], []).append(run["after"]["win_rate"])
    mean = {variant: sum(rates) / len(rates) for variant, rates in won.items()}
    return {v: rate / mean["base"] for v, rate in mean.items()} if mean.get("base") else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--gpus", type=int, default=0, help="0: runs see what this process sees")
    parser.add_argument("--at-once", type=int, default=1, help="runs on one GPU at a time")
    parser.add_argument("--minutes", type=float, default=60.0, help="then runs are ended as they are")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results/tuning.json")
    parser.add_argument("--merge", action="store_true", help="keep what the file holds of other runs")
    parser.add_argument("--show", action="store_true", help="print the file's table, for the docs, and end")
    options, given = parser.parse_known_args()
    if options.show:
        print(markdown(json.loads(options.json.read_text())["raw"]["runs"]))
        return
    with tempfile.TemporaryDirectory() as scratch:
        runs = play(options, Path(scratch), [o for o in given if o != "--"])
    if options.merge and options.json.exists():
        new = {(r["variant"], r["seed"]) for r in runs}
        kept = json.loads(options.json.read_text())["raw"]["runs"]
        runs = [r for r in kept if (r["variant"], r["seed"]) not in new] + runs
    options.json.parent.mkdir(parents=True, exist_ok=True)
    raw = {"base": BASE, "variants": VARIANTS, "runs": runs}
    options.json.write_text(
        json.dumps({**environment(), "ratios": ratios(runs), "raw": raw}, indent=1) + "\n"
    )
    print(table(runs))


if __name__ == "__main__":
    main()
