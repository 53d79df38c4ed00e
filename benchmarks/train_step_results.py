"""Measured training steps: which runs stand, what they come to, and the file that keeps them.

Invariant: a ratio compares runs of one machine. A file may hold several machines' runs, each under its own
machine; of a ratio that several of them have, the one that was measured last is named, but before those that
took more memory than the other side.
"""

import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from benchmarks.train_step_ways import MERGED_PEERS, OURS, TREES

Run = dict[str, Any]
PLACE = ("hardware", "versions", "gpu")
"""What makes a machine."""
OF_THE_CALL = ("operators", "profile", "small", "seconds", "repeats")
"""What a kept run leaves out."""


def key(run: Run) -> tuple[Any, ...]:
    """What a run measured, and where."""
    ways = json.dumps(run["options"]), run["checkpointing"], run["rows"], run["budget"], run["groups"]
    place = json.dumps(run.get("place"), sort_keys=True)
    return run["model"], run["workload"], run["way"], place, *ways


def merged(runs: Iterable[Run]) -> list[Run]:
    """Later runs of the same measurement take the place of earlier ones, unless they found nothing."""
    found: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        if "step_s" in run or key(run) not in found:
            found[key(run)] = run
    return list(found.values())


def best(runs: Sequence[Run], model: str, workload: str, ways: Iterable[str]) -> Any:
    """The fastest run among some ways, or None."""
    wanted = set(ways)
    fitting = [
        r
        for r in runs
        if r["model"] == model and r["workload"] == workload and r["way"] in wanted and "step_s" in r
    ]
    return max(fitting, key=lambda r: r["trained_tokens_per_s"], default=None)


def ratios(runs: Sequence[Run]) -> dict[str, float]:
    """What the figures come to: trained tokens a second against others', memory likewise."""
    found: dict[str, float] = {}
    for place in _places(runs):
        for name, pair in _pairs(_ratios_of([r for r in runs if r.get("place") == place])):
            before = found.get(f"{name}_memory")
            if before is None or before > MORE or pair.get(f"{name}_memory", 0.0) <= MORE:
                found |= pair
    for name in ("w1_tree_vs_step_rows", "w2_best_vs_peer"):
        values = [v for n, v in found.items() if n.startswith(f"{name}_") and not n.endswith("_memory")]
        if values:
            found[name] = min(values)
    return found


MORE = 1.05
"""Memory beside the other's from which it counts as more."""


def _pairs(named: dict[str, float]) -> list[tuple[str, dict[str, float]]]:
    """Each ratio of speeds with that of memory, where there is one."""
    names = [name for name in named if not name.endswith("_memory")]
    return [(n, {k: named[k] for k in (n, f"{n}_memory") if k in named}) for n in names]


def _places(runs: Iterable[Run]) -> list[Any]:
    places: list[Any] = []
    for run in runs:
        if run.get("place") not in places:
            places.append(run.get("place"))
    return places


def _ratios_of(runs: Sequence[Run]) -> dict[str, float]:
    found: dict[str, float] = {}

    def compare(name: str, ours: Any, theirs: Any) -> None:
        if ours and theirs:
            found[name] = round(ours["trained_tokens_per_s"] / theirs["trained_tokens_per_s"], 3)
            found[f"{name}_memory"] = round(ours["peak_gib"] / theirs["peak_gib"], 3)

    for model in dict.fromkeys(r["model"] for r in runs):
        ours = best(runs, model, "w1", TREES)
        compare(f"w1_tree_vs_best_peer_{model}", ours, best(runs, model, "w1", MERGED_PEERS))
        for way in (*MERGED_PEERS, "packed_fused", "padded_fused"):
            compare(f"w1_tree_vs_{way}_{model}", ours, best(runs, model, "w1", [way]))
        compare(f"w1_tree_vs_step_rows_{model}", ours, best(runs, model, "w1", ["peft_step_rows"]))
        for workload in ("w2", "w3"):
            compare(
                f"{workload}_best_vs_peer_{model}",
                best(runs, model, workload, OURS),
                best(runs, model, workload, MERGED_PEERS),
            )
        sizes = {n: best(runs, model, f"g{n}", TREES) for n in (4, 8, 16, 32)}
        if sizes[4] and sizes[32]:
            cost = sizes[32]["step_s"] / sizes[4]["step_s"]
            unique = sizes[32]["work"]["unique"] / sizes[4]["work"]["unique"]
            found[f"group_32_vs_4_cost_per_unique_{model}"] = round(cost / unique, 3)
    return found


def table(runs: Sequence[Run]) -> str:
    """One line for each run."""
    lines = [f"{'model':6} {'work':4} {'way':16} {'tokens/s':>9} {'GiB':>6} {'compile':>8} {'norm':>8}"]
    for r in runs:
        head = f"{r['model']:6} {r['workload']:4} {r['way']:16}"
        if "step_s" in r:
            lines.append(
                f"{head} {r['trained_tokens_per_s']:9.0f} {r['peak_gib']:6.1f} "
                f"{r['compile_s']:7.1f}s {r['grad_norm']:8.4f}"
            )
        if "error" in r:
            lines.append(f"{head} {r['error'][:150]}")
    return "\n".join(lines)


def this_machine() -> dict[str, Any]:
    """The machine that this process runs on."""
    return {**environment(), "gpu": gpu_name()}


def read(path: Path) -> list[Run]:
    """The runs of a result file, each with its ``place``."""
    result = json.loads(path.read_text())
    machines = result.get("machines") or [{name: result[name] for name in PLACE}]
    return [
        {**{k: v for k, v in run.items() if k != "machine"}, "place": machines[run.get("machine", 0)]}
        for run in result["raw"]["runs"]
    ]


def read_all(paths: Iterable[Path]) -> list[Run]:
    """The runs of several files. Calls on one machine may have had different cores of it."""
    found: list[Run] = []
    whole: list[Any] = []
    for path in paths:
        runs = read(path)
        if "machines" not in json.loads(path.read_text()):
            for run in runs:
                run["cores"] = run["place"]["hardware"].get("cores")
                same = [place for place in whole if _but_cores(place) == _but_cores(run["place"])]
                whole += [] if same else [run["place"]]
                run["place"] = (same or [run["place"]])[0]
        found += runs
    return found


def _but_cores(place: dict[str, Any]) -> dict[str, Any]:
    return {**place, "hardware": {k: v for k, v in place["hardware"].items() if k != "cores"}}


def write(out: Path, runs: Sequence[Run]) -> None:
    """Write runs beside the machines that made them; profiles go into files of their own.

    Args:
        out: the file.
        runs: those of other machines have a ``place``; the others are this machine's.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    here = {name: this_machine()[name] for name in PLACE}
    placed = [{**run, "place": run.get("place", here)} for run in runs]
    machines = _places(placed) or [here]
    kept: list[Run] = []
    for run in placed:
        if "operators" in run:
            name = f"{out.stem}.profile.{run['model']}.{run['workload']}.{run['way']}.txt"
            (out.parent / name).write_text(run["operators"])
        told = {k: v for k, v in run.items() if k not in (*OF_THE_CALL, "place")}
        kept.append({**told, "machine": machines.index(run["place"])})
    several = {"machines": machines} if len(machines) > 1 else {}
    result = {**machines[-1], **several, "ratios": ratios(placed), "raw": {"runs": kept}}
    out.write_text(json.dumps(result, indent=1) + "\n")


def gpu_name() -> str | None:
    """The GPU's name, asked of the driver so that this process holds no memory of it."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
