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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Table, insert

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, when run as a script

from art_core.store import Store, codec
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
    Failure,
    PolicyVersion,
    RolloutStatus,
    Scenario,
    Span,
    Step,
    StepIdentity,
    StepTokens,
    Trajectory,
)

NODES = ("planner", "search", "writer")
VARIANTS = 12
"""Different conversations about each scenario; rollouts of a scenario share them."""

HOSTILE = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror=alert(1)>',
    "\u202egnp.exe\u202c",
    "\x1b[31mred\x1b]0;title\x07",
    "{{ 7 * 7 }} {% raw %}",
    "x" * 1_000_000,
)
"""Texts that a careless page would obey, or drown in."""

Row = dict[str, Any]


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
        Scenario(f"question-{n:03}", {"question": _question(n)}, {"split": "train"})
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
    every = _Rollouts(tasks, group_size, chance, hostile)
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
            known = set(table.c.keys())
            if rows:
                connection.execute(insert(table), [{k: v for k, v in r.items() if k in known} for r in rows])

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
        store.save_trajectory(_long(long_tokens, tasks[0], PolicyVersion(names[-1], 1), now), run_id=ids[-1])
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


# -- rollouts ----------------------------------------------------------------------------------------


def _question(n: int) -> str:
    return f"Which of the {n + 3} invoices in the mailbox was paid twice, and by whom?"


class _Rollouts:
    """Rows of rollouts, made from a few encoded conversations about each scenario."""

    def __init__(self, tasks: list[Scenario], size: int, chance: random.Random, hostile: bool) -> None:
        self._tasks = tasks
        self._size = size
        self._chance = chance
        self._hostile = hostile
        self.scenario_rows = [codec.scenario_row(task) for task in tasks]
        self.pieces: dict[bytes, bytes] = {}
        self._conversations = [
            [self._conversation(task, v) for v in range(VARIANTS)] for task in range(len(tasks))
        ]
        self._made = 0

    def _conversation(self, task: int, variant: int) -> tuple[list[Row], list[Span]]:
        made = _conversation(self._tasks[task], task, variant)
        encoded = [codec.encode_step(step) for step in made]
        for step in encoded:
            self.pieces.update(step.pieces)
        return [step.row for step in encoded], _spans(made)

    def group(
        self,
        made: dict[str, list[Row]],
        number: int,
        run_id: str,
        policy: PolicyVersion,
        at: float,
        quality: float,
    ) -> None:
        """A group's rows."""
        chance = self._chance
        task = chance.randrange(len(self._tasks))
        group_id, digest = f"g-{number:06}", self.scenario_rows[task]["digest"]
        made["group"].append({"id": group_id, "run_id": run_id, "scenario": digest, "created_at": at})
        for position in range(self._size):
            name, began = f"t-{self._made:07}", at + position * 0.5
            self._made += 1
            failed = chance.random() < 0.04
            reward = None if failed else min(1.0, max(0.0, round(chance.gauss(quality, 0.25), 2)))
            conversation, traced = self._conversations[task][chance.randrange(VARIANTS)]
            if failed:
                conversation = conversation[: chance.randint(1, 2)]
            failure = self._failure() if failed else None
            made["trajectory"].append(
                {
                    "id": name,
                    "run_id": run_id,
                    "group_id": group_id,
                    "group_position": position,
                    "scenario": digest,
                    "status": (RolloutStatus.FAILED if failed else RolloutStatus.FINISHED).value,
                    "reward": reward,
                    "components": "{}" if reward is None else to_json({"correct": reward, "brevity": 0.5}),
                    "step_rewards": "{}",
                    "node_rewards": "{}",
                    "metrics": "{}",
                    "metadata": "{}",
                    "faults": "{}",
                    "failure": None if failure is None else to_json(asdict(failure)),
                    "started_at": began,
                    "duration": 3.5 + chance.random(),
                    "policy_number": policy.number,
                }
            )
            for n, row in enumerate(conversation):
                made["step"].append(
                    row
                    | {
                        "id": f"s-{name}-{n}",
                        "rollout_id": name,
                        "model": policy.name,
                        "policy_model": policy.model,
                        "policy_number": policy.number,
                        "started_at": began + n,
                    }
                )
            spans = [replace(span, started_at=began + span.started_at) for span in traced]
            made["span"].append({"rollout_id": name, "body": codec.encode_spans(spans)})
            if reward is not None:
                made["score"].append(
                    {
                        "trajectory_id": name,
                        "reward": reward,
                        "components": to_json({"correct": reward}),
                        "author": "ruler",
                        "explanation": "It names the invoice and who paid it, but not the date.",
                        "created_at": began + 5,
                    }
                )

    def _failure(self) -> Failure:
        cause = self._chance.choice(("timeout", "exception", "exception", "judge"))
        message = HOSTILE[self._made % 6] if self._hostile else f"the rollout ended by {cause}"
        return Failure(cause, message, "builtins.TimeoutError" if cause == "timeout" else None)


def _conversation(task: Scenario, number: int, variant: int) -> list[Step]:
    """Three calls: a plan, a search with a tool, an answer; they share their beginning."""
    chance = random.Random(number * 1000 + variant)
    question = str(task.inputs["question"])
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You look into a mailbox and answer in one sentence."},
        {"role": "user", "content": question},
    ]
    prompt = [1, 5, 9, *range(100, 160), *(1000 + number * 7 + k for k in range(20))]
    made: list[Step] = []
    for n, node in enumerate(NODES):
        said = 12 + chance.randrange(18)
        sampled = [2000 + chance.randrange(6 if k < 4 else 400) for k in range(said)] + [2]
        logprobs = tuple(-abs(chance.gauss(0, 1.1)) for _ in sampled)
        response: dict[str, Any] = {
            "role": "assistant",
            "content": f"{node} {variant}: " + "I look at it. " * 3,
        }
        if node == "search":
            arguments = json.dumps({"query": f"invoice {variant}", "limit": 5})
            call = {
                "id": f"c{variant}",
                "type": "function",
                "function": {"name": "search", "arguments": arguments},
            }
            response = {"role": "assistant", "content": None, "tool_calls": [call]}
        made.append(
            Step(
                id=f"s-{n}",
                rollout_id="",
                messages=tuple(messages),
                model="agent@0",
                started_at=float(n),
                duration=0.4 + chance.random(),
                response=response,
                finish_reason="tool_calls" if node == "search" else "stop",
                tokens=StepTokens(tuple(prompt), tuple(sampled), logprobs),
                identity=StepIdentity(node=node, namespace=f"{node}:{n}", graph_step=n + 1),
                usage={"prompt_tokens": len(prompt), "completion_tokens": len(sampled)},
            )
        )
        messages = [*messages, response]
        prompt = [*prompt, *sampled, 7]
        if node == "search":
            result = f"[{variant} mails found] From: ana@example.org. Paid on the 3rd. " * 4
            messages = [*messages, {"role": "tool", "tool_call_id": f"c{variant}", "content": result}]
            prompt = [*prompt, *(5000 + chance.randrange(300) for _ in range(60))]
    return made


def _spans(made: list[Step]) -> list[Span]:
    found = [Span(id="p-graph", kind="chain", name="LangGraph", started_at=0.0, duration=4.0)]
    for n, step in enumerate(made):
        node = step.identity.node or ""
        common = {"node": node, "namespace": step.identity.namespace}
        found.append(
            Span(
                id=f"p-{n}",
                kind="chain",
                name=node,
                started_at=float(n),
                duration=1.0,
                parent_id="p-graph",
                **common,
            )
        )
        if node == "search":
            found.append(
                Span(
                    id=f"p-{n}-tool",
                    kind="tool",
                    name="search",
                    started_at=n + 0.5,
                    duration=0.2,
                    parent_id=f"p-{n}",
                    inputs={"query": "invoice"},
                    outputs="2 mails",
                    **common,
                )
            )
    return found


def _long(tokens: int, task: Scenario, policy: PolicyVersion, now: float) -> Trajectory:
    """A rollout with that many tokens: thirty calls, half prompt and half answer."""
    chance = random.Random(7)
    calls = 30
    each = tokens // calls // 2
    made = tuple(
        Step(
            id=f"s-long-{n}",
            rollout_id="long-rollout",
            messages=({"role": "user", "content": f"part {n} " + "word " * each},),
            model=policy.name,
            started_at=now + n,
            duration=1.0,
            response={"role": "assistant", "content": "answer " * each},
            finish_reason="stop",
            tokens=StepTokens(
                tuple(range(each)),
                tuple(chance.randrange(30_000) for _ in range(each)),
                tuple(-abs(chance.gauss(0, 1)) for _ in range(each)),
            ),
            policy=policy,
            identity=StepIdentity(node=NODES[n % 3], namespace=f"{NODES[n % 3]}:{n}", graph_step=n + 1),
        )
        for n in range(calls)
    )
    return Trajectory(
        id="long-rollout",
        scenario=task,
        steps=made,
        status=RolloutStatus.FINISHED,
        reward=0.5,
        started_at=now,
        duration=30.0,
    )


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
