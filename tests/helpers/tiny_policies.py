"""Policies of tiny random models, the losses that they are trained with, and games that they played."""

from pathlib import Path
from typing import get_args

import torch
from helpers.training import group, step, trajectory

from art_core.config import LoRAConfig, LossName
from art_core.training.peft_policy import PeftPolicy
from art_core.types import TrajectoryGroup

LOSSES: tuple[LossName, ...] = get_args(LossName)


def load(directory: Path, *, seed: int = 0, awake: bool = True) -> PeftPolicy:
    """A policy; awake: with an adapter that already changes the model, so that all gradients flow."""
    policy = PeftPolicy.load(str(directory), LoRAConfig(rank=4, alpha=8), dtype="float32", seed=seed)
    if awake:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in policy.trainable_parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


def games(n: int = 8) -> TrajectoryGroup:
    """Trajectories of one group that answered differently; half of them were right."""
    return group(
        *(
            trajectory(f"t{i}", float(i % 2), step(f"s{i}", [5, 6, 7], [10 + i, 2], logprobs=[-5.5, -5.9]))
            for i in range(n)
        )
    )
