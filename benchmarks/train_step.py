"""One optimizer step over agent rollouts, our ways against others': speed and memory from one machine.

    python benchmarks/train_step.py                                    # all that this machine can do
    python benchmarks/train_step.py --models 135m --workloads w1 --only tree_fused unsloth_rows --gpu 1
    python benchmarks/train_step.py --merge a.json b.json              # results of several calls as one
    python benchmarks/train_step.py --small                            # a tiny form for CPUs

Every way (`train_step_ways.WAYS`) gets the same token ids (`train_step_work.WORKLOADS`), bfloat16, LoRA of
rank 16 on all linear layers, the same loss, and a process of its own, because Unsloth patches libraries for
the whole process. ``w1`` is an agent's group (a long prompt with tools, many rollouts of several turns),
``w2`` a single turn, ``w3`` one very long rollout, ``g4`` to ``g32`` are w1 with other group sizes. The
first step, which compiles, is told apart. Results are written after each way, so an interrupted call keeps
what it has.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the repository, when run as a script

from benchmarks.train_step_job import Job, reset  # noqa: E402 - see the line above
from benchmarks.train_step_results import merged, ratios, read_all, table, write  # noqa: E402 - likewise
from benchmarks.train_step_ways import NEEDS_UNSLOTH, WAYS, needs_missing  # noqa: E402 - likewise

NAMES = {"135m": "SmolLM2-135M", "05b": "Qwen2.5-Coder-0.5B", "7b": "Qwen2 7B shape", "tiny": "tiny"}
GIB = 2**30

SETTINGS: dict[str, dict[str, Any]] = {
    "tiny": {"groups": {"w1": 1, "w2": 1}, "rows": {"w1": 2, "w2": 4}, "checkpointing": False},
    "135m": {"groups": {"w1": 2, "w2": 4}, "rows": {"w1": 4, "w2": 16}, "checkpointing": False},
    "05b": {"groups": {"w1": 2, "w2": 4}, "rows": {"w1": 4, "w2": 16}, "checkpointing": False},
    "7b": {"groups": {"w1": 1, "w2": 2}, "rows": {"w1": 2, "w2": 8}, "checkpointing": True},
}
"""By model: groups in a step, rows in one forward pass of the ways that compute rows, checkpointing."""
BUDGET = 40960
TINY_BUDGET = 2048


def specification(args: argparse.Namespace, model: str, workload: str, way: str) -> dict[str, Any]:
    """What one measurement is: JSON that a process of its own can be given."""
    settings = SETTINGS[model]
    long = workload == "w3"
    kind = "w2" if workload == "w2" else "w1"
    groups = settings["groups"][kind] if workload in ("w1", "w2") else 1
    checkpointing = settings["checkpointing"] or long
    if args.checkpointing is not None:
        checkpointing = args.checkpointing
    return {
        "model": model,
        "workload": workload,
        "way": way,
        "groups": args.groups or groups,
        "rows": 1 if long else args.rows or settings["rows"][kind],
        "budget": args.budget or (80_000 if long else TINY_BUDGET if args.small else BUDGET),
        "checkpointing": checkpointing,
        "options": json.loads(args.options),
        "repeats": args.repeats,
        "seconds": args.seconds,
        "small": args.small,
        "profile": args.profile,
    }


def measure(spec: dict[str, Any], directory: str, note: Any) -> dict[str, Any]:
    """Load, step, time. ``note`` is called with the result so far after each step."""
    if spec["way"] in NEEDS_UNSLOTH:
        import unsloth  # noqa: F401 - must come before transformers
    from dataclasses import replace

    import torch

    from benchmarks.train_step_work import SHAPES, SMALL, WORKLOADS, described, groups

    device = "cuda" if torch.cuda.is_available() and not spec["small"] else "cpu"
    work = replace((SMALL if spec["small"] else WORKLOADS)[spec["workload"]], groups=spec["groups"])
    job = Job(
        directory=directory,
        rollouts=groups(work, SHAPES[spec["model"]]["vocab_size"]),
        device=device,
        checkpointing=spec["checkpointing"],
        rows=spec["rows"],
        budget=spec["budget"],
        exact=device == "cpu",
        options=spec["options"],
    )
    began = time.perf_counter()
    way = WAYS[spec["way"]](job)
    found: dict[str, Any] = {**spec, "work": described(work), "load_s": time.perf_counter() - began}
    times: list[float] = []
    while len(times) <= spec["repeats"]:
        if len(times) == 1:
            reset(job)
        at = time.perf_counter()
        norm = way.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - at)
        if len(times) == 1:
            began = time.perf_counter()  # compiling takes no time from what is measured
        steady = statistics.median(times[1:] or times)
        found |= {
            "step_s": steady,
            "first_step_s": times[0],
            "compile_s": max(0.0, times[0] - steady),
            "steps": len(times) - 1,
            "trained_tokens_per_s": work.trained / steady,
            "grad_norm": norm,
            "notes": way.notes,
            **memory(device),
        }
        note(found)
        if len(times) > 1 and time.perf_counter() - began > spec["seconds"]:
            break
    if spec["profile"]:
        found["operators"] = profiled(way.step, device)
        note(found)
    return found


def memory(device: str) -> dict[str, float]:
    """Peak memory: of the GPU's tensors and of its allocator; of the process where there is no GPU."""
    import torch

    if device == "cuda":
        return {
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        }
    import resource

    return {"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def profiled(step: Any, device: str) -> str:
    """One step under torch's profiler: its table of operators, by time on the device."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as seen:
        step()
    by = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    return seen.key_averages().table(sort_by=by, row_limit=50, max_name_column_width=90)


# -- the driver ------------------------------------------------------------------------------------------


def model_directory(args: argparse.Namespace, model: str) -> str:
    """A directory given, the machine's own, or one of random weights that is written now."""
    given = dict(entry.split("=", 1) for entry in args.model_dir)
    if model in given:
        return given[model]
    if model == "135m" and os.environ.get("GPU_MODEL"):
        return os.environ["GPU_MODEL"]
    directory = Path(args.scratch) / model
    if args.small:
        from benchmarks.train_step_work import write_model

        return str(write_model(model, directory, "cpu"))
    if not (directory / "ready").exists():
        code = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
            "import torch; from pathlib import Path; from benchmarks.train_step_work import write_model\n"
            "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
            f"write_model({model!r}, Path({str(directory)!r}), device)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, env=environment_of(args))
    return str(directory)


def environment_of(args: argparse.Namespace) -> dict[str, str]:
    chosen = {} if args.gpu is None else {"CUDA_VISIBLE_DEVICES": str(args.gpu)}
    return {
        **os.environ,
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "HF_HUB_OFFLINE": "1",
        **chosen,
    }


def in_a_process(args: argparse.Namespace, spec: dict[str, Any], directory: str) -> dict[str, Any]:
    """Measure in a process of its own; what it had found stays when it fails or takes too long."""
    with tempfile.TemporaryDirectory() as scratch:
        out, log = Path(scratch) / "result.json", Path(scratch) / "log"
        command = [sys.executable, __file__, "--worker", json.dumps(spec), directory, str(out)]
        with log.open("w") as written:
            try:
                done = subprocess.run(
                    command,
                    timeout=args.timeout,
                    stdout=written,
                    stderr=subprocess.STDOUT,
                    env=environment_of(args),
                )
                error = None if done.returncode == 0 else f"exit code {done.returncode}"
            except subprocess.TimeoutExpired:
                error = f"not done after {args.timeout} s"
        found = json.loads(out.read_text()) if out.exists() else dict(spec)
        if error:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            found["error"] = f"{error}: " + " | ".join(lines[-6:])[-1500:]
        return found


def worker(spec: dict[str, Any], directory: str, out: Path) -> None:
    def note(found: dict[str, Any]) -> None:
        fresh = out.with_suffix(".new")
        fresh.write_text(json.dumps(found))
        fresh.replace(out)

    measure(spec, directory, note)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(NAMES), default=None)
    parser.add_argument("--workloads", nargs="+", default=None, help="w1 w2 w3 g4 g8 g16 g32")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=None, help="these ways")
    parser.add_argument("--model-dir", nargs="*", default=[], help="NAME=DIRECTORY, e.g. 05b=/models/qwen")
    parser.add_argument("--scratch", default=str(Path(tempfile.gettempdir()) / "art-train-step"))
    parser.add_argument("--gpu", type=int, default=None, help="which GPU; several calls may use several")
    parser.add_argument("--timeout", type=float, default=200, help="seconds for one way")
    parser.add_argument("--deadline", type=float, default=None, help="seconds after which no way is begun")
    parser.add_argument("--repeats", type=int, default=5, help="steps that are timed")
    parser.add_argument("--seconds", type=float, default=20, help="no further step after so long")
    parser.add_argument("--groups", type=int, default=None, help="groups in the step")
    parser.add_argument("--rows", type=int, default=None, help="rows in one forward pass of row ways")
    parser.add_argument("--budget", type=int, default=None, help="places in one forward pass of ours")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--options", default="{}", help='JSON for the ways, e.g. \'{"path": "packed"}\'')
    parser.add_argument("--profile", action="store_true", help="also a table of operators for each way")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on the CPU, in this process")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/train_step.json")
    parser.add_argument("--merge", nargs="+", type=Path, default=None, help="results to write as one")
    parser.add_argument("--worker", nargs=3, default=None, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.worker:
        spec, directory, out = args.worker
        worker(json.loads(spec), directory, Path(out))
        return
    if args.merge:
        runs = merged(read_all(args.merge))
        write(args.out, runs)
        print(table(runs), json.dumps(ratios(runs), indent=1), sep="\n")
        return
    small_ways = ["tree_fused", "tree_modules", "packed_fused", "peft_rows", "peft_step_rows"]
    models = args.models or (["tiny"] if args.small else ["135m", "05b", "7b"])
    workloads = args.workloads or ["w1", "w2"]
    ways = args.only or (small_ways if args.small else list(WAYS))
    began = time.perf_counter()
    runs: list[dict[str, Any]] = []
    for model in models:
        directory = model_directory(args, model)
        for workload in workloads:
            for way in ways:
                if args.deadline is not None and time.perf_counter() - began > args.deadline:
                    print(f"{model} {workload} {way}: not begun, the deadline has passed")
                    continue
                spec = specification(args, model, workload, way)
                if missing := needs_missing(way):
                    runs.append({**spec, "error": f"{missing} is not installed"})
                elif args.small:
                    runs.append(measure(spec, directory, lambda found: None))
                else:
                    runs.append(in_a_process(args, spec, directory))
                runs = merged(runs)
                write(args.out, runs)
                print(table(runs[-1:]).splitlines()[-1], flush=True)
    print(table(runs), json.dumps(ratios(runs), indent=1), sep="\n")


if __name__ == "__main__":
    main()
