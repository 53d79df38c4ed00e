"""What trainer processes are asked to build in tests; they find it here by its name."""

from collections.abc import Callable
from functools import partial

import torch

from art_core.config import LoRAConfig
from art_core.training.policy import PeftPolicy


def tiny_policy(directory: str, rank: int) -> "Callable[[str], PeftPolicy]":
    """What builds a policy whose adapter already changes the model, in float32."""
    return partial(_load, directory, rank)


def _load(directory: str, rank: int, device: str) -> PeftPolicy:
    policy = PeftPolicy.load(directory, LoRAConfig(rank=rank, alpha=2 * rank), dtype="float32", device=device)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(device))
    return policy
