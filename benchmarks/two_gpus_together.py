"""One trainer over several GPUs: trained tokens a second, and whether the gradients are one GPU's."""

import argparse
import gc
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from art_core.config import GuardrailConfig, LoRAConfig, ParallelConfig, TrainConfig
from art_core.training.forward import Kernels
from art_core.training.launch import TrainerProcesses
from art_core.training.peft_policy import PeftPolicy
from benchmarks.environment import told
from benchmarks.train_step_work import SMALL, W1, Workload, groups, trajectory_groups, write_model

LORA = LoRAConfig(rank=16, alpha=32)
EQUALITY = Workload(prompt=256, rollouts=8, turns=3, sampled=40, tool=40, groups=3)
"""Small enough that float32 on one GPU takes a second."""


def measure(args: argparse.Namespace, sheet: Any) -> None:
    """Every model under every strategy and number of processes."""
    for model in ["tiny"] if args.small else args.models:
        directory = model_directory(args, model)
        if not args.no_equality and model != "7b":
            compare(args, sheet, model, directory)
        for count in sorted(args.processes):
            ways: Any = product(args.strategies, args.kernels) if count > 1 else [("ddp", "auto")]
            for strategy, kernels in ways:
                name = f"{model} {strategy} {count}" + ("" if kernels == "auto" else f" {kernels}")
                try:
                    run = speed(args, model, directory, strategy, count, kernels)
                except Exception as failed:
                    run = {"error": told(failed)}
                sheet.add({"part": "together", "name": name, "model": model, **run})


def speed(
    args: argparse.Namespace, model: str, directory: Path, strategy: Any, count: int, kernels: Kernels
) -> dict[str, Any]:
    """Trained tokens a second, as seen by whoever calls ``train``."""
    work = workload(args, model)
    batch = trajectory_groups(groups(work, 1000 if args.small else 40_000))
    config = TrainConfig(
        loss="dapo",
        learning_rate=1e-5,
        path="tree",
        token_budget=args.token_budget,
        guardrails=UNGUARDED,
    )
    began = time.perf_counter()
    dtype = "float32" if args.small else "bfloat16"
    with trainer(args, directory, config, strategy, count, dtype, kernels) as ranks:
        ready = time.perf_counter() - began
        began = time.perf_counter()
        report = ranks.train(batch)
        norms = [report.metrics["grad_norm"]]
        events = [event.kind for event in report.events]
        first = time.perf_counter() - began
        seconds, inside = [], []
        for _ in range(args.steps):
            began = time.perf_counter()
            report = ranks.train(batch)
            seconds.append(time.perf_counter() - began)
            inside.append(report.metrics["seconds"])
            norms.append(report.metrics["grad_norm"])
            events += [event.kind for event in report.events]
        entries = report.metrics["entries"]
        description = ranks.description
        peak = ranks.call("peak_memory")
    middle = sorted(seconds)[len(seconds) // 2]
    return {
        "processes": count,
        "strategy": strategy,
        "kernels": kernels,
        "events": events,
        "tokens_per_second": entries / middle,
        "step_seconds": seconds,
        "seconds_inside": inside,
        "first_step_seconds": first,
        "ready_seconds": ready,
        "trained_tokens": entries,
        "tree_nodes": report.metrics["tree_nodes"],
        "groups": work.groups,
        "grad_norms": norms,
        "parameters_held": description.held,
        "parameters": description.parameters,
        "peak_bytes_first_rank": peak,
    }


def compare(args: argparse.Namespace, sheet: Any, model: str, directory: Path) -> None:
    """The very first gradient in float32, of two processes against one."""
    work = SMALL["w1"] if args.small else EQUALITY
    batch = trajectory_groups(groups(work, 1000 if args.small else 40_000))
    config = TrainConfig(
        learning_rate=1e-5,
        loss="dapo",
        path="tree",
        token_budget=256 if args.small else 2048,
        max_grad_norm=1e9,
        guardrails=UNGUARDED,
    )
    one: list[torch.Tensor] | None = None
    for count, strategy in [(1, "ddp"), *((2, strategy) for strategy in args.strategies)]:
        name = f"{model} {strategy} {count} float32"
        try:
            with trainer(args, directory, config, strategy, count, "float32") as ranks:
                report = ranks.train(batch)
                state = ranks.state_dict()["optimizer"]["adamw"]["state"]
            # AdamW's first moment after one step is a tenth of the gradient.
            found = [10 * state[i]["exp_avg"] for i in sorted(state)]
            if one is None:
                one = found
            run: dict[str, Any] = {
                "largest_gradient": max(float(g.abs().max()) for g in one),
                "largest_gradient_difference": max(
                    float((a - b).abs().max()) for a, b in zip(found, one, strict=True)
                ),
                "grad_norm": report.metrics["grad_norm"],
                "loss": report.metrics["loss"],
            }
            if count == 1:
                del run["largest_gradient_difference"]
        except Exception as failed:
            run = {"error": told(failed)}
        sheet.add({"part": "together", "name": name, "model": model, **run})


UNGUARDED = GuardrailConfig(max_kl=None, max_norm_growth=None, max_clip_fraction=None)
"""Random tokens are nothing that a policy would have sampled."""


@contextmanager
def trainer(
    args: argparse.Namespace,
    directory: Path,
    config: TrainConfig,
    strategy: Any,
    count: int,
    dtype: Any,
    kernels: Kernels = "auto",
) -> Iterator[TrainerProcesses]:
    """Trainer processes; their logs stay in the scratch directory."""
    gc.collect()
    logs = args.scratch / "logs" / f"{directory.name}-{strategy}-{count}-{dtype}"
    shutil.rmtree(logs, ignore_errors=True)
    ranks = TrainerProcesses(
        partial(load, str(directory), dtype, kernels),
        LORA,
        config,
        ParallelConfig(processes=count, strategy=strategy, timeout=300),
        log_dir=logs,
    )
    try:
        yield ranks
    finally:
        ranks.close()


def load(directory: str, dtype: Any, kernels: Kernels, device: str) -> PeftPolicy:
    """What each process loads; its adapter changes the model already, so that all gradients flow."""
    policy = PeftPolicy.load(directory, LORA, dtype=dtype, device=device, kernels=kernels)
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=dice).to(parameter.device))
    return policy


def workload(args: argparse.Namespace, model: str) -> Workload:
    """W1: agents with a long common prompt, several groups of them."""
    if args.small:
        return Workload(prompt=96, rollouts=4, turns=2, sampled=8, tool=8, groups=args.groups or 4)
    count = args.groups or (4 if model == "7b" else 16)
    return Workload(W1.prompt, W1.rollouts, W1.turns, W1.sampled, W1.tool, count)


def model_directory(args: argparse.Namespace, model: str) -> Path:
    """A directory given, the machine's own, or one of random weights that is written now."""
    given = dict(entry.split("=", 1) for entry in args.model_dir)
    if model in given:
        return Path(given[model])
    if model == "135m" and os.environ.get("GPU_MODEL"):
        return Path(os.environ["GPU_MODEL"])
    shared = Path("/tmp/art-train-step") / model  # where train_step.py writes the same shapes
    if (shared / "ready").exists():
        return shared
    directory = write_model(model, args.scratch / model, "cuda" if torch.cuda.is_available() else "cpu")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return directory
