"""The trainer beside vLLM: tic-tac-toe on one GPU in turns, and on two with rollouts going on meanwhile."""

import argparse
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from art_core import (
    EngineConfig,
    LocalBackend,
    LoRAConfig,
    ParallelConfig,
    TrainableModel,
    TrainConfig,
    alearn,
)
from art_core.learning import LearningStep
from art_core.store import Store
from art_core.types import Scenario, TrajectoryGroup
from art_langgraph import Workers, agather
from benchmarks.environment import told
from benchmarks.two_gpus_cpu import CpuWatch
from examples.tic_tac_toe.demo import AGENTS, HELD_OUT, outcomes, random_player_conversations

STALENESS = {"shared": 0, "resident": 0, "apart0": 0, "overlap1": 1, "overlap4": 4}
"""By mode: versions that a game may be behind.

Trainer and server have one GPU in turns (``shared``: vLLM sleeps meanwhile), one GPU both at a time
(``resident``: vLLM waits meanwhile), or one each.
"""


async def measure_modes(args: argparse.Namespace, sheet: Any) -> None:
    """Each mode from its own warm start, with the same scenarios and settings."""
    for mode in args.mode:
        try:
            run = await measure(args, mode)
        except Exception as failed:
            run = {"error": told(failed)}
        sheet.add({"part": "apart", "name": mode, **run})


async def measure(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Warm start, training, held-out games."""
    one_gpu = mode in ("shared", "resident")
    stamp = time.strftime("%H%M%S")
    model = TrainableModel(
        base_model=base_model(args),
        project="two-gpus",
        name=f"{mode}-{stamp}",
        lora=LoRAConfig(rank=16, alpha=32),
        train=TrainConfig(
            learning_rate=2e-4,
            advantage="std",
            epochs=2,
            entropy_target=0.15,
            path="tree",
            token_budget=1024 if args.small else 8192,
        ),
        seed=args.seed,
    )
    engine = EngineConfig(
        kind="embedded" if args.small else "vllm",
        max_model_len=512,
        max_loras=STALENESS[mode] + 2,
        python=args.vllm_python,
        colocate=mode == "shared" and not args.small,
    )
    backend = LocalBackend(
        engine=engine, root=args.scratch / mode, parallel=None if one_gpu else ParallelConfig()
    )
    began = time.perf_counter()
    await model.aregister(backend)
    ready = time.perf_counter() - began
    async with model, Workers(args.workers) as workers:

        async def play(scenarios: Sequence[Scenario], size: int, how: str) -> list[TrajectoryGroup]:
            return await agather(
                AGENTS[how],
                scenarios,
                group_size=size,
                concurrency=512,
                reward="examples.tic_tac_toe.agent:reward",
                model=model,
                workers=workers,
                seed=args.seed,
                progress=False,
            )

        await model.asft(
            random_player_conversations(args.seed, 64 * args.warm_steps),
            batch_size=64,
            steps=args.warm_steps,
            learning_rate=5e-4,
        )
        held_out = [opponent(HELD_OUT + i) for i in range(8 if args.small else 500)]
        before = score(await play(held_out, 1, "greedy"))
        steps: list[dict[str, Any]] = []
        with GpuWatch() as watch, CpuWatch() as cpu:
            began = time.perf_counter()

            def keep(step: LearningStep) -> None:
                steps.append(described(step, time.perf_counter() - began))
                print(mode, steps[-1], flush=True)

            learned = await alearn(
                model,
                lambda scenario: play([scenario], args.group_size, "sampled"),
                (opponent(1000 * args.seed + i) for i in count()),
                groups_per_step=args.groups,
                steps=args.steps,
                staleness=STALENESS[mode],
                on_step=keep,
            )
        after = score(await play(held_out, 1, "greedy"))
    return {
        "staleness": STALENESS[mode],
        "steps_per_minute": 60 * len(learned.steps) / learned.seconds,
        "games_per_second": sum(s["games"] for s in steps) / learned.seconds,
        "phase_seconds": phases(args.scratch / mode, model, args.steps),
        "trainer_idle_share": learned.trainer_idle,
        "gpu_idle_share": watch.idle,
        "cores_used": cpu.cores,
        "dropped_groups": learned.dropped,
        "staleness_mean": fmean(s["staleness_mean"] for s in steps),
        "ready_seconds": ready,
        "before": before,
        "after": after,
        "steps": steps,
    }


def phases(root: Path, model: TrainableModel, steps: int) -> dict[str, float]:
    """Seconds of each phase of a step, as the record has them: means of the last steps."""
    store = Store.open(model.config.project, root)
    try:
        run = store.runs()[-1].id
        last = store.last_step(run)
        timed = [m for m in store.metrics(run) if m.name.startswith("time/") and m.step > last - steps]
    finally:
        store.close()
    names = {metric.name for metric in timed}
    return {n.removeprefix("time/"): fmean(m.value for m in timed if m.name == n) for n in sorted(names)}


def opponent(seed: int) -> Scenario:
    return Scenario(f"opponent-{seed}", inputs={"opponent": seed})


def base_model(args: argparse.Namespace) -> str:
    """The model that plays."""
    given = args.model or os.environ.get("GPU_MODEL")
    if given is None:
        from examples.prepare_model import smollm2

        return str(smollm2())
    return given


def described(step: LearningStep, at: float) -> dict[str, Any]:
    """A step's figures."""
    ended = outcomes(step.groups)
    metrics = step.report.metrics
    return {
        "step": step.step,
        "at": at,
        "games": len(ended),
        "win_rate": ended.count("win") / len(ended),
        "illegal_rate": ended.count("illegal") / len(ended),
        "reward": metrics["reward_mean"],
        "entropy": metrics.get("entropy"),
        "kl_old_new": metrics.get("kl_old_new"),
        "importance_mean": metrics.get("importance_mean"),
        "staleness_mean": fmean(step.staleness),
        "staleness_max": max(step.staleness),
        "dropped": step.dropped,
        "wait_seconds": step.wait_seconds,
        "train_seconds": step.train_seconds,
        "inside_seconds": metrics["seconds"],  # of it, what the trainer's process took
        "tree_nodes": metrics["tree_nodes"],
    }


def score(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """How held-out games ended."""
    ended = outcomes(groups)
    return {
        "games": len(ended),
        "win_rate": ended.count("win") / len(ended),
        "illegal_rate": ended.count("illegal") / len(ended),
    }


class GpuWatch:
    """What share of the time each GPU stood idle, as the driver samples it; empty without a driver.

    A sample is the share of a sixth of a second to a second in which some kernel ran, so this says when a
    GPU had nothing at all to do, not how much of it was used.
    """

    def __init__(self) -> None:
        self.idle: list[float] = []

    def __enter__(self) -> "GpuWatch":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        query = [
            "nvidia-smi",
            "--query-gpu=index,utilization.gpu",
            "--format=csv,noheader,nounits",
            "-lms",
            "250",
        ]
        if visible:
            query += ["-i", visible]
        try:
            self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        except OSError:
            self._process = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        said, _ = self._process.communicate()
        busy: dict[str, list[float]] = {}
        for index, share in _samples(said):
            busy.setdefault(index, []).append(share)
        self.idle = [1 - fmean(busy[index]) / 100 for index in sorted(busy)]


def _samples(said: str) -> Iterator[tuple[str, float]]:
    for line in said.splitlines():
        index, _, share = line.partition(",")
        if share.strip().isdecimal():
            yield index.strip(), float(share)
