"""Ways to make one optimizer step over the same rollouts: libraries as people use them, and ours.

Each way is a function that loads a model and returns `Way`: a function that makes one whole step, gradient,
clipping and AdamW included, and returns the gradient's norm. All of them train LoRA of rank 16 on all linear
layers with the same loss: minus advantage times ratio, mean over the trained tokens of the step.
"""

import os
from collections.abc import Callable
from typing import Any

from benchmarks.train_step_job import ALPHA, LINEAR, RANK, RATE, Job, Way
from benchmarks.train_step_rows import peft_rows, peft_step_rows, unsloth_rows
from benchmarks.train_step_trl import trl, trl_unsloth


def trained(job: Job, policy: Any) -> Way:
    """Our trainer's update, from trees that are cut already to the new weights."""
    import time

    import torch

    from art_core.config import TrainConfig
    from art_core.training.batch import prepare
    from art_core.training.grpo import Trainer
    from art_core.training.update import Passes, accumulate_policy_gradient
    from benchmarks.train_step_work import trajectory_groups

    for name, value in job.options.get("policy", {}).items():
        setattr(policy, name, value)
    policy.gradient_checkpointing = job.checkpointing
    config = TrainConfig(loss="dapo", learning_rate=RATE, token_budget=job.budget)
    trainer = Trainer(policy, config)
    groups = trajectory_groups(job.rollouts)
    began = time.perf_counter()
    batch = prepare(groups, config, torch.Generator().manual_seed(0))
    seconds = time.perf_counter() - began
    (minibatch,) = batch.minibatches
    tree = getattr(minibatch, "tree", minibatch)
    passes = Passes(policy, trainer.budget, trainer.ranks, lambda: None)

    def step() -> float:
        trainer.optimizer.zero_grad()
        accumulate_policy_gradient(passes, tree, config, trainer.coefficients, proximal=None, base=None)
        norm = trainer.optimizer.grad_norm()
        trainer.optimizer.step(RATE, norm)
        trainer.optimizer.zero_grad()
        return float(norm)

    pieces = trainer.budget.share(tree).pieces
    notes = {"prepare_seconds": round(seconds, 4), "nodes": len(tree), "pieces": len(pieces)}
    return Way(step, {**notes, "path": policy.path})


def peft_policy(job: Job, kernels: str) -> Any:
    from art_core.config import LoRAConfig
    from art_core.training.peft_policy import PeftPolicy

    return PeftPolicy.load(
        job.directory,
        LoRAConfig(rank=RANK, alpha=ALPHA, target_modules=tuple(LINEAR)),
        dtype="float32" if job.exact else "bfloat16",
        device=job.device,
        kernels=kernels,
    )


def tree_modules(job: Job) -> Way:
    """Our tree in transformers' and PEFT's own modules."""
    return trained(job, peft_policy(job, "modules"))


def tree_fused(job: Job) -> Way:
    """Our tree in fused kernels, as it is by default."""
    return trained(job, peft_policy(job, "fused"))


def tree_flex(job: Job) -> Way:
    """The same with FlexAttention alone."""
    policy = peft_policy(job, "fused")
    policy.attention = "flex"
    return trained(job, policy)


def tree_trunk(job: Job) -> Way:
    """The same with trunks by a dense kernel, whatever their share."""
    policy = peft_policy(job, "fused")
    policy.attention = "trunk"
    return trained(job, policy)


def packed_fused(job: Job) -> Way:
    """Rows, packed, in fused kernels: what the tree saves, with all else equal."""
    policy = peft_policy(job, "fused")
    policy.path = "packed"
    return trained(job, policy)


def padded_fused(job: Job) -> Way:
    """Rows, padded, in fused kernels and plain causal attention."""
    policy = peft_policy(job, "fused")
    policy.path = "padded"
    return trained(job, policy)


def unsloth_policy(job: Job) -> Way:
    """Our trainer over Unsloth's rows."""
    import unsloth  # noqa: F401 - before transformers

    from art_core.config import LoRAConfig
    from art_core.training.unsloth_policy import UnslothPolicy

    longest = max(len(r.ids) for group in job.rollouts for r in group)
    policy = UnslothPolicy.load(
        job.directory,
        LoRAConfig(rank=RANK, alpha=ALPHA),
        dtype="float32" if job.exact else "bfloat16",
        device=job.device,
        max_length=max(longest, job.budget) + 64,
    )
    policy.path = job.options.get("path", "padded")
    return trained(job, policy)


WAYS: dict[str, Callable[[Job], Way]] = {
    "tree_fused": tree_fused,
    "unsloth_rows": unsloth_rows,
    "peft_rows": peft_rows,
    "unsloth_policy": unsloth_policy,
    "tree_flex": tree_flex,
    "tree_trunk": tree_trunk,
    "tree_modules": tree_modules,
    "trl": trl,
    "trl_unsloth": trl_unsloth,
    "padded_fused": padded_fused,
    "packed_fused": packed_fused,
    "peft_step_rows": peft_step_rows,
}
TREES = ("tree_fused", "tree_flex", "tree_trunk", "tree_modules")
OURS = (*TREES, "packed_fused", "padded_fused", "unsloth_policy")
MERGED_PEERS = ("unsloth_rows", "peft_rows", "trl", "trl_unsloth")
NEEDS_UNSLOTH = ("unsloth_rows", "trl_unsloth", "unsloth_policy")


def needs_missing(name: str) -> str | None:
    """The library that a way lacks here, if any."""
    from importlib.util import find_spec

    wanted = (["unsloth"] if name in NEEDS_UNSLOTH else []) + (["trl"] if name.startswith("trl") else [])
    return next((library for library in wanted if find_spec(library) is None), None)


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
