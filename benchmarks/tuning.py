"""What each choice of algorithm does to the tic-tac-toe agent: one run of the demo for each.

    python benchmarks/tuning.py --cpu --at-once 2 --minutes 180
    python benchmarks/tuning.py --cpu --show
    python benchmarks/tuning.py --gpus 4 --minutes 9 -- --model DIR --engine vllm ...

Every variant is the base's options with one thing changed. There are two forms: one for GPUs, and one that a
machine of two cores does in minutes a run (``--cpu``). The base is run first, with every seed.

Runs are dealt over the GPUs, a few at a time on each; when the time is up, those that still run are ended and
keep the figures that they had. The file is written whenever a run ends; ``--merge`` keeps what it holds of
other runs, ``--missing`` also runs nothing twice. ``--show`` prints the file's table, and draws its curves
where ``--picture`` says. Arguments after ``--`` go to every run of the demo.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, when run as a script

from art_core.observe.machine import in_words
from benchmarks.environment import environment
from benchmarks.tuning_forms import FORMS, Form
from benchmarks.tuning_table import draw, markdown, ratios, table

DEMO = Path(__file__).resolve().parents[1] / "examples/tic_tac_toe/demo.py"


@dataclass
class Run:
    """One run of the demo, begun."""

    variant: str
    seed: int
    gpu: int | None
    out: Path
    process: subprocess.Popen[bytes]

    def result(self) -> dict[str, Any] | None:
        """Its figures so far; None before the first step, or when it was ended while it wrote them."""
        written = sorted(self.out.glob("*/result.json"))
        try:
            return json.loads(written[-1].read_text()) if written else None
        except json.JSONDecodeError:
            return None

    def end(self) -> None:
        """End it with everything that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)


def begin(form: Form, variant: str, seed: int, gpu: int | None, out: Path, given: list[str]) -> Run:
    """Start a run in a process group of its own, its output in a file."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(DEMO), "--out", str(out), *form.options(variant, seed, given)]
    shown = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    with (out / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **shown}, start_new_session=True
        )
    return Run(variant, seed, gpu, out, process)


def play(
    form: Form,
    waiting: list[tuple[str, int]],
    places: list[int | None],
    minutes: float,
    out: Path,
    given: list[str],
) -> Iterator[dict[str, Any]]:
    """All runs, as many at a time as there are places; each one's figures when it ends.

    Those that still run when the time is up, or when the caller is interrupted, are ended.
    """
    deadline = time.monotonic() + 60 * minutes
    running: list[Run] = []
    stopped: KeyboardInterrupt | None = None
    try:
        while (waiting or running) and time.monotonic() < deadline:
            for run in [r for r in running if r.process.poll() is not None]:
                running.remove(run)
                places.append(run.gpu)
                yield summary(run)
            while waiting and places:
                variant, seed = waiting.pop(0)
                running.append(begin(form, variant, seed, places.pop(0), out / f"{variant}-{seed}", given))
            time.sleep(1)
    except KeyboardInterrupt as interrupt:
        stopped = interrupt
    finally:
        for run in running:
            run.end()
    yield from (summary(run) for run in running)
    for variant, seed in waiting:
        print(f"{variant}, seed {seed}: not begun, {'the time was up' if stopped is None else 'interrupted'}")
    if stopped is not None:
        raise stopped


def summary(run: Run) -> dict[str, Any]:
    """A run's figures; the end of its log where it has none."""
    result = run.result()
    found: dict[str, Any] = {"variant": run.variant, "seed": run.seed, "exit": run.process.returncode}
    if result is None:
        return {**found, "log": (run.out / "log.txt").read_text(errors="replace")[-2000:]}
    return found | {name: result[name] for name in ("options", "seconds", "before", "after", "steps")}


@dataclass(frozen=True)
class Kept:
    """The file of results, of one form: it is whole at any time."""

    path: Path
    form: str

    def runs(self) -> list[dict[str, Any]]:
        """What it holds."""
        if not self.path.exists():
            return []
        raw = json.loads(self.path.read_text())["raw"]
        if raw["form"] != self.form:
            sys.exit(
                f"{self.path} holds runs of the {raw['form']} form, not {self.form}: give another --json"
            )
        return raw["runs"]

    def machine(self) -> str:
        """Where its runs were made, for people."""
        return in_words(json.loads(self.path.read_text()))

    def write(self, runs: list[dict[str, Any]]) -> None:
        """Replace it."""
        form = FORMS[self.form]
        raw = {"form": self.form, "base": form.base, "variants": form.variants, "runs": runs}
        whole = json.dumps({**environment(), "ratios": ratios(runs), "raw": raw}, indent=1) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(whole)
        new.replace(self.path)


def interrupted(number: int, frame: object) -> None:
    """Let a signal end the program as Ctrl-C does."""
    raise KeyboardInterrupt


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """The command line, and what of it goes to the demo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cpu", dest="form", action="store_const", const="cpu", default="gpu", help="the small form"
    )
    parser.add_argument("--variants", nargs="+", help="default: all of the form")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--gpus", type=int, default=0, help="0: runs see what this process sees")
    parser.add_argument("--at-once", type=int, default=1, help="runs on one GPU at a time, or on the CPU")
    parser.add_argument("--minutes", type=float, default=60.0, help="then runs are ended as they are")
    parser.add_argument("--json", type=Path, help="default: results/tuning.json, tuning_gpu.json for GPUs")
    parser.add_argument("--merge", action="store_true", help="keep what the file holds of other runs")
    parser.add_argument("--missing", action="store_true", help="the same, and run only what it does not hold")
    parser.add_argument("--show", action="store_true", help="print the file's table, for the docs, and end")
    parser.add_argument("--picture", type=Path, help="with --show: draw the curves into this file")
    options, given = parser.parse_known_args()
    known = FORMS[options.form].variants
    options.variants = options.variants or list(known)
    if unknown := set(options.variants) - set(known):
        parser.error(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    name = "tuning.json" if options.form == "cpu" else "tuning_gpu.json"
    options.json = options.json or Path(__file__).parent / "results" / name
    return options, [o for o in given if o != "--"]


def main() -> None:
    options, given = arguments()
    file = Kept(options.json, options.form)
    if options.show:
        runs = file.runs()
        print(markdown(runs, FORMS[options.form]))
        if options.picture is not None:
            draw(runs, options.picture, file.machine())
        return
    kept = {(r["variant"], r["seed"]): r for r in file.runs()} if options.merge or options.missing else {}
    waiting = [(variant, seed) for seed in options.seeds for variant in options.variants]
    waiting.sort(key=lambda run: run[0] != "base")  # what all others are read against
    if options.missing:
        waiting = [run for run in waiting if not kept.get(run, {}).get("after")]
    if not options.gpus:  # runs at the same time share the cores
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.at_once)))
    places: list[int | None] = [*range(options.gpus)] * options.at_once or [None] * options.at_once
    signal.signal(signal.SIGTERM, interrupted)  # so that no run is left behind
    with tempfile.TemporaryDirectory() as scratch:
        played = play(FORMS[options.form], waiting, places, options.minutes, Path(scratch), given)
        try:
            for run in played:
                which = run["variant"], run["seed"]
                if run.get("after") or not kept.get(which, {}).get("after"):  # what came to its end stays
                    kept[which] = run
                file.write(list(kept.values()))
                print(table([run]), flush=True)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
    print(table(list(kept.values())))


if __name__ == "__main__":
    main()
