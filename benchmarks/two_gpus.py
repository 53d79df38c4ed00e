"""Several GPUs: the trainer beside vLLM, one trainer over all of them, and vLLM on several.

    python benchmarks/two_gpus.py together --models 135m 7b --processes 1 2 --kernels auto modules
    python benchmarks/two_gpus.py apart --mode shared overlap1 overlap4 --model DIR
    python benchmarks/two_gpus.py serving --what tensor_parallel replicas
    python benchmarks/two_gpus.py merge RESULT.json ... --out benchmarks/results/two_gpus.json

Parts may run at the same time on different GPUs (``--gpus 2 3``), each with an ``--out`` of its own; what has
been measured is written after each run, and ``merge`` puts files together. ``--small`` is the form for CPUs.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, when run as a script

from benchmarks.environment import RESULTS, environment

PARTS = ("together", "apart", "serving")


def gpu_names() -> list[str]:
    """The machine's GPUs, as the driver names them."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


class Sheet:
    """Runs of one call, written to a file after each.

    Args:
        out: the file; runs that it holds already are kept.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.runs: list[dict[str, Any]] = read(out) if out.exists() else []

    def add(self, run: Mapping[str, Any]) -> None:
        """Keep a run, in place of an earlier one of the same name, and write all."""
        self.runs = merged([self.runs, [dict(run)]])
        write(self.out, self.runs)
        print(json.dumps({k: v for k, v in run.items() if k != "steps"}, default=str), flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """The runs of a result file, each with the cores that it had."""
    whole = json.loads(path.read_text())
    cores = whole["hardware"].get("cores")
    return [{"cores": cores, **run} for run in whole["raw"]["runs"]]


def merged(sheets: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """All runs; a later one replaces an earlier one of the same part and name, unless it failed."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for sheet in sheets:
        for run in sheet:
            key = run["part"], run["name"]
            if "error" not in run or "error" in found.get(key, {"error": ""}):
                found[key] = dict(run)
    return [found[key] for key in sorted(found)]


def write(out: Path, runs: Sequence[Mapping[str, Any]], place: Mapping[str, Any] | None = None) -> None:
    """Write runs, what they say, and where they were measured.

    Args:
        out: the file.
        runs: all of one machine.
        place: hardware and versions; None: this machine's.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    if place is None:
        known = environment()
        known["hardware"]["gpus"] = gpu_names()
        place = known
    whole = {**place, "ratios": ratios(runs), "raw": {"runs": list(runs)}}
    scratch = out.with_suffix(".writing")
    scratch.write_text(json.dumps(whole, indent=1) + "\n")
    scratch.replace(out)


def place_of(files: Iterable[Path]) -> dict[str, Any]:
    """Hardware and versions that result files have in common; of cores, which calls may share, the most.

    Raises:
        SystemExit: they were measured on different machines, so that their runs are no ratios.
    """
    places: list[dict[str, Any]] = []
    cores = 0
    for file in files:
        place = {k: v for k, v in json.loads(file.read_text()).items() if k not in ("ratios", "raw")}
        cores = max(cores, place["hardware"].pop("cores", 0))
        if place not in places:
            places.append(place)
    if len(places) != 1:
        raise SystemExit(f"these files are of {len(places)} machines; merge those of one: {places}")
    places[0]["hardware"]["cores"] = cores
    return places[0]


def ratios(runs: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What is claimed of the runs; a figure that was not measured is absent."""
    by_name = {(run["part"], run["name"]): run for run in runs if "error" not in run}
    found: dict[str, float] = {}

    def ratio(name: str, part: str, upper: str, lower: str, figure: str) -> None:
        above, below = by_name.get((part, upper)), by_name.get((part, lower))
        if above and below and figure in above and below.get(figure):
            found[name] = above[figure] / below[figure]

    for (part, name), run in by_name.items():
        if part == "together" and "tokens_per_second" in run:
            ratio(f"{name}_vs_one_gpu", part, name, f"{run['model']} ddp 1", "tokens_per_second")
        if part == "together" and "largest_gradient_difference" in run:
            found[f"{name}_gradient_difference"] = run["largest_gradient_difference"]
    for mode in ("overlap1", "overlap4"):
        for one_gpu in ("shared", "resident"):
            name = f"apart_{mode}_vs_{one_gpu}_steps_per_minute"
            ratio(name, "apart", mode, one_gpu, "steps_per_minute")
    ratio("two_replicas_vs_one", "serving", "replicas", "one", "tokens_per_second")
    ratio("tensor_parallel_vs_one", "serving", "tensor_parallel", "one", "tokens_per_second")
    return {name: value for name, value in found.items() if not name.endswith("ddp 1_vs_one_gpu")}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--out", type=Path, default=RESULTS / "two_gpus.json")
    common.add_argument("--gpus", type=int, nargs="+", help="which GPUs to use; default: all")
    common.add_argument("--small", action="store_true", help="tiny shapes, for CPUs")
    common.add_argument("--scratch", type=Path, default=Path("/tmp/art-two-gpus"), help="models and logs")
    common.add_argument("--model-dir", action="append", default=[], metavar="NAME=DIR", help="a real model")
    common.add_argument("--vllm-python", type=Path, help="interpreter of another environment that has vLLM")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    together = parts.add_parser("together", parents=[common], help="one trainer over several GPUs")
    together.add_argument("--models", nargs="+", default=["135m", "7b"])
    together.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    together.add_argument("--strategies", nargs="+", default=["ddp", "fsdp2"])
    together.add_argument("--groups", type=int, help="groups of W1 in a step; default: 4 (7b), 16 (others)")
    together.add_argument(
        "--steps", type=int, default=3, help="steps that are measured, after one that is not"
    )
    together.add_argument("--token-budget", type=int, default=8192)
    together.add_argument(
        "--kernels",
        nargs="+",
        default=["auto"],
        choices=("auto", "fused", "modules"),
        help="what runs the layers of two processes; one always has what is best",
    )
    together.add_argument("--no-equality", action="store_true", help="skip the comparison of gradients")
    apart = parts.add_parser("apart", parents=[common], help="the trainer beside vLLM")
    apart.add_argument(
        "--mode",
        nargs="+",
        default=["shared", "overlap1", "overlap4"],
        choices=("shared", "resident", "apart0", "overlap1", "overlap4"),
    )
    apart.add_argument("--model", help="directory of the model that plays; default: GPU_MODEL")
    apart.add_argument("--steps", type=int, default=25)
    apart.add_argument("--groups", type=int, default=32, help="groups in a step")
    apart.add_argument("--group-size", type=int, default=16)
    apart.add_argument("--warm-steps", type=int, default=40)
    apart.add_argument("--workers", type=int, default=8, help="processes that play")
    apart.add_argument("--seed", type=int, default=0)
    serving = parts.add_parser("serving", parents=[common], help="vLLM on several GPUs")
    serving.add_argument("--what", nargs="+", default=["one", "tensor_parallel", "replicas"])
    serving.add_argument("--model", default="05b", help="name of a shape, or a directory")
    serving.add_argument("--concurrency", type=int, default=256)
    serving.add_argument("--seconds", type=float, default=20.0, help="of each load")
    serving.add_argument(
        "--gpu-memory", type=float, default=0.6, help="share of a GPU that a server may take"
    )
    merge = parts.add_parser("merge", help="put result files together")
    merge.add_argument("files", type=Path, nargs="+")
    merge.add_argument("--out", type=Path, default=RESULTS / "two_gpus.json")
    merge.add_argument("--picture", type=Path, help="a PNG of the trainer beside vLLM")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.part == "merge":
        write(args.out, merged(read(file) for file in args.files), place_of(args.files))
        print(json.dumps(json.loads(args.out.read_text())["ratios"], indent=1))
        if args.picture is not None:
            from benchmarks.two_gpus_picture import draw

            draw(read(args.out), args.picture)
        return
    if args.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, args.gpus))
    sheet = Sheet(args.out)
    began = time.perf_counter()
    if args.part == "together":
        from benchmarks.two_gpus_together import measure

        measure(args, sheet)
    elif args.part == "apart":
        from benchmarks.two_gpus_apart import measure_modes

        asyncio.run(measure_modes(args, sheet))
    else:
        from benchmarks.two_gpus_serving import measure_serving

        asyncio.run(measure_serving(args, sheet))
    print(json.dumps(ratios(sheet.runs), indent=1))
    print(f"{args.part}: {time.perf_counter() - began:.0f} s, {sheet.out}")


if __name__ == "__main__":
    main()
