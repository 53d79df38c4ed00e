"""A store as a project of many runs leaves it, made up in seconds.

What is in it looks real: runs that learn, stall or fail; groups whose members share prompts and fork; nodes,
tools and retries; rollouts that failed; events of guardrails and knobs. Rows go straight into the tables, in
one transaction for each table, since 100,000 rollouts one by one would take minutes. As a script it makes a
store to look at::

    python tests/helpers/synthetic_store.py ROOT --runs 200 --trajectories 100000
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

from sqlalchemy import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, when run as a script
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from helpers.synthetic_rollouts import HOSTILE, NODES, Rollouts, Row, long_trajectory, question

from art_core.store import Store
from art_core.store.contents import insert_contents
from art_core.store.database import writing
from art_core.store.packing import to_json
from art_core.store.schema import (
    events,
    groups,
    metrics,
    policy_versions,
    runs,
    scenarios,
    scores,
    spans,
    steps,
    trajectories,
)
from art_core.types import (
    PolicyVersion,
    Scenario,
)

__all__ = ["HOSTILE", "fill"]


def fill(
    store: Store,
    *,
    run_count: int = 3,
    train_steps: int = 20,
    rollouts: int = 480,
    group_size: int = 8,
    scenario_count: int = 20,
    seed: int = 0,
    hostile: bool = False,
    long_tokens: int = 0,
    live: bool = False,
) -> list[str]:
    """Fill a store; the ids of its runs, oldest first.

    Args:
        store: a new one.
        run_count: training runs.
        train_steps: training steps of each run.
        rollouts: of all runs together, in whole groups.
        group_size: rollouts of a group.
        scenario_count: scenarios, which the runs share.
        seed: of what varies.
        hostile: model names, scenario ids, event and failure messages are `HOSTILE` texts.
        long_tokens: tokens of one more rollout of the newest run, ``long-rollout``; 0 for none.
        live: the newest run has not ended.
    """
    chance = random.Random(seed)
    names = [f"agent-{n % 4}" for n in range(run_count)]
    tasks = [
        Scenario(f"question-{n:03}", {"question": question(n)}, {"split": "train"})
        for n in range(scenario_count)
    ]
    if hostile:
        names = [HOSTILE[n % 5] for n in range(run_count)]
        tasks = [
            Scenario(HOSTILE[n % 6], {"question": HOSTILE[n % 6]}, {"n": n}) for n in range(scenario_count)
        ]
    now = time.time()
    begun = [now - (run_count - n) * 3600.0 for n in range(run_count)]
    ids = [f"r-{n:04}" for n in range(run_count)]
    every = Rollouts(tasks, group_size, chance, hostile)
    groups_made = -(-rollouts // group_size)
    made: dict[str, list[Row]] = {"group": [], "trajectory": [], "step": [], "span": [], "score": []}
    for g in range(groups_made):
        run = g % run_count
        at = (g // run_count) * train_steps // max(1, -(-groups_made // run_count))
        policy = PolicyVersion(names[run], at)
        quality = _reward(run, at, train_steps)
        every.group(made, g, ids[run], policy, begun[run] + at * 60.0, quality)
    with writing(store._engine) as connection:

        def write(table: Table, rows: list[Row]) -> None:
            """Straight to SQLite, whose values these are: by way of SQLAlchemy it takes twice as long."""
            if rows:
                names = [column.name for column in table.columns if column.name in rows[0]]
                marks = ", ".join("?" * len(names))
                columns = ", ".join(f'"{name}"' for name in names)
                statement = f'INSERT INTO "{table.name}" ({columns}) VALUES ({marks})'
                connection.exec_driver_sql(statement, list(map(itemgetter(*names), rows)))

        write(runs, [_run(n, ids, names, begun, train_steps, live) for n in range(run_count)])
        write(scenarios, list({row["digest"]: row for row in every.scenario_rows}.values()))
        insert_contents(connection, every.pieces)
        write(groups, made["group"])
        write(trajectories, made["trajectory"])
        write(steps, made["step"])
        write(spans, made["span"])
        write(scores, made["score"])
        write(
            metrics, [m for n in range(run_count) for m in _metrics(n, ids[n], begun[n], train_steps, chance)]
        )
        write(policy_versions, list(_versions(ids, names, begun, train_steps)))
        write(
            events, [e for n in range(run_count) for e in _events(n, ids[n], begun[n], train_steps, hostile)]
        )
    if long_tokens:
        store.save_trajectory(
            long_trajectory(long_tokens, tasks[0], PolicyVersion(names[-1], 1), now), run_id=ids[-1]
        )
    return ids


# -- runs --------------------------------------------------------------------------------------------


def _run(n: int, ids: list[str], names: list[str], begun: list[float], train_steps: int, live: bool) -> Row:
    state = "running" if live and n == len(ids) - 1 else ("failed" if n % 17 == 5 else "finished")
    config = {
        "name": names[n],
        "project": "synthetic",
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "seed": n,
        "train": {"learning_rate": (1 + n % 3) * 1e-5, "loss": "grpo", "kl_coef": 0.0},
    }
    return {
        "id": ids[n],
        "model": names[n],
        "config": to_json(config),
        "started_at": begun[n],
        "ended_at": None if state == "running" else begun[n] + train_steps * 60.0,
        "state": state,
    }


def _reward(run: int, step: int, train_steps: int) -> float:
    """Runs learn well, a little, not at all, or lose it again."""
    share = step / max(1, train_steps)
    gain = (0.6, 0.25, 0.0, 0.5)[run % 4] / (1 + math.exp(-9 * (share - 0.4)))
    lost = max(0.0, share - 0.65) * 1.2 if run % 4 == 3 else 0.0
    return 0.2 + gain - lost


def _metrics(n: int, run_id: str, begun: float, train_steps: int, chance: random.Random) -> Iterator[Row]:
    for step in range(1, train_steps + 1):
        reward = _reward(n, step, train_steps) + chance.gauss(0, 0.02)
        share = step / train_steps
        values = {
            "reward_mean": reward,
            "reward_std": 0.32 - 0.15 * share + chance.gauss(0, 0.01),
            "groups": 8.0,
            "groups_without_spread": float(chance.randint(0, 2)),
            "trajectories": 64.0,
            "trajectories_failed": float(chance.choice((0, 0, 0, 1, 2))),
            "entries": 4000 + chance.gauss(0, 200),
            "tree_nodes": 9000 + chance.gauss(0, 300),
            "tokens_total": 31000 + chance.gauss(0, 800),
            "unique_share": 0.29 + chance.gauss(0, 0.01),
            "kl_old_new": 0.002 + 0.01 * share + abs(chance.gauss(0, 0.002)),
            "entropy": 1.2 - 0.7 * share + chance.gauss(0, 0.02),
            "clip_fraction": 0.03 + abs(chance.gauss(0, 0.01)),
            "ratio_mean": 1 + chance.gauss(0, 0.004),
            "ratio_max": 1.3 + abs(chance.gauss(0, 0.2)),
            "behaviour_ratio_p50": 1 + chance.gauss(0, 0.002),
            "behaviour_ratio_p99": 1.15 + abs(chance.gauss(0, 0.05)),
            "effective_sample_size": 0.97 - abs(chance.gauss(0, 0.01)),
            "success_rate": min(1.0, max(0.0, reward - 0.1 + chance.gauss(0, 0.03))),
            "reward_group_std": 0.2 - 0.08 * share + chance.gauss(0, 0.01),
            "reward/component/correct": reward - 0.1,
            "reward/component/brevity": 0.5 + chance.gauss(0, 0.02),
            "failures/timeout": float(chance.choice((0, 0, 1))),
            "calls": 190 + chance.gauss(0, 5),
            "steps_truncated": float(chance.randint(0, 3)),
            "loss": chance.gauss(0, 0.02),
            "grad_norm": 0.4 + abs(chance.gauss(0, 0.08)),
            "learning_rate": 1e-5,
            "updates": 1.0,
            "updates_skipped": float(step == train_steps * 9 // 20),
            "staleness_mean": 0.9 + chance.gauss(0, 0.05),
            "staleness_max": 1.0,
            "policy_version": float(step),
            "seconds": 22 + chance.gauss(0, 1),
            "time/rollout": 28 + chance.gauss(0, 2),
            "time/judge": 5 + abs(chance.gauss(0, 1)),
            "time/train": 22 + chance.gauss(0, 1),
            "time/publish": 2.5 + abs(chance.gauss(0, 0.3)),
            "time/wait": 1 + abs(chance.gauss(0, 0.3)),
            "time/step": 60 + chance.gauss(0, 2),
            "tokens_per_second/rollout": 420 + chance.gauss(0, 15),
            "tokens_per_second/train": 190 + chance.gauss(0, 6),
            "judge_calls": 16.0,
            "judge_cost": 0.02 + abs(chance.gauss(0, 0.002)),
        }
        for node in NODES:
            values[f"node/{node}/calls"] = 1 + abs(chance.gauss(0, 0.05))
            values[f"node/{node}/tokens"] = 20 + chance.gauss(0, 2)
            values[f"node/{node}/latency"] = 0.8 + abs(chance.gauss(0, 0.1))
        at = begun + step * 60.0
        for name, value in values.items():
            yield {"run_id": run_id, "step": step, "name": name, "value": value, "created_at": at}


def _versions(ids: list[str], names: list[str], begun: list[float], train_steps: int) -> Iterator[Row]:
    numbers: dict[str, int] = {}
    for run_id, name, start in zip(ids, names, begun, strict=True):
        for step in range(1, min(train_steps, 3) + 1):
            numbers[name] = number = numbers.get(name, 0) + 1
            yield {
                "model": name,
                "number": number,
                "run_id": run_id,
                "adapter_dir": None,
                "metadata": "{}",
                "created_at": start + step * 60.0,
            }


def _events(n: int, run_id: str, begun: float, train_steps: int, hostile: bool) -> Iterator[Row]:
    said = [
        (
            0.2,
            "knob_turned",
            "learning_rate turned by call: as configured to 3e-05",
            {"name": "learning_rate", "before": None, "after": 3e-5},
        ),
        (
            0.45,
            "update_skipped",
            "update 9 skipped: its gradient norm 41.2 is more than max_norm_growth=30 times the usual 0.42",
            {"value": 41.2, "limit": 12.6},
        ),
        (
            0.6,
            "learning_rate_lowered",
            "learning rate lowered to 0.5 of what was configured: in 3 calls in a row the share of "
            "clipped tokens is 0.61 (limit 0.5)",
            {"value": 0.61, "limit": 0.5},
        ),
        (0.8, "engine_restarted", "the server died and was started again: exit code 137", {}),
    ]
    if hostile:
        said += [(0.5, HOSTILE[k % 5], HOSTILE[k], {"text": HOSTILE[k]}) for k in range(len(HOSTILE))]
    for share, kind, message, data in said:
        at = begun + share * train_steps * 60.0
        yield {"run_id": run_id, "kind": kind, "message": message, "data": json.dumps(data), "created_at": at}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", type=Path, help="directory of the store")
    parser.add_argument("--project", default="synthetic")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trajectories", type=int, default=480)
    parser.add_argument("--long-tokens", type=int, default=60_000)
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--live", action="store_true")
    options = parser.parse_args()
    began = time.perf_counter()
    with Store.open(options.project, options.root) as store:
        fill(
            store,
            run_count=options.runs,
            train_steps=options.steps,
            rollouts=options.trajectories,
            hostile=options.hostile,
            long_tokens=options.long_tokens,
            live=options.live,
        )
        print(f"{store.location}: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
