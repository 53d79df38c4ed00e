"""How often the audit finds each planted fault, and how often it cries over a sound reward.

Twelve faulty rewards and five sound ones (`audit_rewards`) over made-up runs, many seeds, two sizes. A fault
counts as found when one of the findings that name it is there; a sound reward raises a false alarm when any
is, whether the audit has all that could be at hand or the record alone. The same for the rewards of the two
examples, over runs of their agents (`audit_examples`). Then the time that the checks of the record take on as
many runs as training looks at.

    python -m benchmarks.audit            # 20 seeds, writes results/audit.json
    python -m benchmarks.audit --quick    # 2 seeds, writes nothing
"""

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from art_core.rewards.audit import audit
from art_core.types import Trajectory, TrajectoryGroup
from benchmarks.audit_cases import Case, correct, scored
from benchmarks.audit_examples import examples
from benchmarks.audit_rewards import FAULTS, SOUND
from benchmarks.audit_runs import step, world
from benchmarks.environment import write_result

FIRST = 1000
"""The first seed; limits were chosen while looking at smaller ones."""
SIZES = ((24, 8), (10, 4))
"""Groups and members: what a few steps of training see, and the least that is worth an audit."""


def rates(seeds: int) -> dict[str, Any]:
    """Detections and false alarms of every case, by size."""
    faults: list[dict[str, Any]] = []
    for fault, cases in FAULTS.items():
        for by, make, names in cases:
            row: dict[str, Any] = {"fault": fault, "by": by, "findings": sorted(names)}
            for groups, members in SIZES:
                reports = [_audited(make(FIRST + n, groups, members)) for n in range(seeds)]
                row[f"{groups}x{members}"] = sum(bool(names & found) for found in reports) / seeds
            faults.append(row)
    sound: list[dict[str, Any]] = []
    for reward, make in SOUND.items():
        for by in ("all", "record"):
            row = {"reward": reward, "by": by}
            for groups, members in SIZES:
                cases = [make(FIRST + n, groups, members) for n in range(seeds)]
                reports = [_audited(case if by == "all" else Case(case.groups)) for case in cases]
                row[f"{groups}x{members}"] = sum(map(bool, reports)) / seeds
                row[f"{groups}x{members} findings"] = dict(Counter(n for found in reports for n in found))
            sound.append(row)
    return {"seeds": seeds, "faults": faults, "sound": sound}


def _audited(case: Case) -> set[str]:
    return {finding.name for finding in audit(case.groups, **case.options).findings}


def seconds(groups: int = 64, members: int = 16, steps: int = 6, words: int = 400) -> dict[str, float]:
    """What the checks of the record take on long runs."""
    rng = random.Random(5)
    made: list[TrajectoryGroup] = []
    vocabulary = [f"word{n}" for n in range(5000)]
    for group in scored(1.0 * correct, world(1, groups, members)):
        runs: list[Trajectory] = []
        for t in group:
            long = [
                step(t.id, n, " ".join(rng.choices(vocabulary, k=words)), prompt="Which town is meant?")
                for n in range(steps)
            ]
            runs.append(replace(t, steps=(*long, *t.steps)))
        made.append(group.with_trajectories(runs))
    began = time.perf_counter()
    report = audit(made)
    took = time.perf_counter() - began
    return {
        "groups": groups,
        "trajectories": report.trajectories,
        "characters_each": steps * words * 8.0,
        "seconds": took,
    }


def show(result: Mapping[str, Any]) -> None:
    """The rates as tables."""
    sizes = [f"{groups}x{members}" for groups, members in SIZES]
    found = Table("fault", "found by", *sizes, title=f"found, of {result['seeds']} seeds")
    for row in result["faults"]:
        found.add_row(row["fault"], row["by"], *(f"{row[size]:.0%}" for size in sizes))
    alarms = Table("sound reward", "looked at", *sizes, title="false alarms")
    for row in result["sound"]:
        alarms.add_row(row["reward"], row["by"], *(f"{row[size]:.0%}" for size in sizes))
    agents = Table("example", "skill", "mean reward", "by the record", "by the function", title="findings")
    for row in result["examples"]:
        said = (f"{', '.join(sorted(set(row[by]))) or 'none'}" for by in ("record", "function"))
        agents.add_row(row["example"], f"{row['skill']:g}", f"{row['reward_mean']:.2f}", *said)
    console = Console()
    console.print(found, alarms, agents, result["record"])


def ratios(measured: dict[str, Any]) -> dict[str, float]:
    """Share of faulty and of sound rewards that were called faulty, by the size of what was audited."""
    found: dict[str, float] = {}
    for groups, members in SIZES:
        size = f"{groups}x{members}"
        for name, cases in (("detected", measured["faults"]), ("false_alarms", measured["sound"])):
            found[f"{name}_{size}"] = sum(case[size] for case in cases) / len(cases)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two seeds; writes nothing")
    quick = parser.parse_args().quick
    seeds = 2 if quick else 20
    agents = asyncio.run(examples(max(seeds // 4, 1)))
    measured = {**rates(seeds), "examples": agents, "record": seconds()}
    show(measured)
    if not quick:
        write_result("audit", measured, ratios(measured))
