"""Shares of one GPU: how much of its memory vLLM takes, and how much is left to a trainer in this process.

Invariant: one number decides, ``EngineConfig.gpu_memory_utilization``; the trainer's part follows from it.

While both stay (``colocate=False``) the trainer gets what vLLM leaves, and is stopped by an error of its own
when it wants more, rather than by taking from vLLM what that counts on. In turns (``colocate=True``) it may
have the whole GPU, but must give all that it does not use before vLLM wakes. Nothing here imports torch: a
process that has not, has no GPU memory.
"""

import gc
import sys
from collections.abc import Sequence
from typing import Any

from art_core.config import EngineConfig
from art_core.errors import ConfigError

RESERVE = 0.05
"""Share of the GPU that neither may plan with: CUDA contexts of both processes, and vLLM's CUDA graphs."""


def shared_with_trainer(config: EngineConfig, visible: Sequence[str]) -> bool:
    """Whether vLLM runs on the GPU that a trainer in this process uses, the first visible one.

    Args:
        config: how vLLM is run, with its devices if it has some of its own.
        visible: GPUs that this process sees, as ``CUDA_VISIBLE_DEVICES`` lists them.
    """
    if not visible:
        return False
    if config.devices is None:
        return True
    return any(visible[0] in block.split(",") for block in config.devices)


def trainer_share(config: EngineConfig) -> float | None:
    """The share of the GPU's memory that the trainer may have; None: no limit.

    Raises:
        ConfigError: vLLM's share leaves nothing.
    """
    if config.colocate:
        return None
    left = 1.0 - config.gpu_memory_utilization - RESERVE
    if left < RESERVE:
        raise ConfigError(
            f"EngineConfig.gpu_memory_utilization={config.gpu_memory_utilization} leaves the trainer "
            f"{max(left, 0):.0%} of the GPU that they share ({RESERVE:.0%} are neither's): lower it, let "
            "them have the GPU in turns (colocate=True), or give vLLM a GPU of its own (devices=('1',))"
        )
    return left


def limit_trainer(config: EngineConfig, visible: Sequence[str]) -> float | None:
    """Keep this process within its share of the first GPU; returns the share, None: no limit was set.

    Raises:
        ConfigError: vLLM's share leaves nothing.
    """
    share = trainer_share(config) if shared_with_trainer(config, visible) else None
    if share is not None:
        import torch

        torch.cuda.set_per_process_memory_fraction(share, 0)
    return share


def free_cached_memory() -> None:
    """Give the driver the GPU memory that this process holds and does not use."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    gc.collect()
    torch.cuda.empty_cache()
