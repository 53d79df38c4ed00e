"""What a way to make a step is asked to do, and what it gives: a function that makes one whole step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RANK, ALPHA = 16, 32
RATE = 1e-5
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Job:
    """What a way is asked to do.

    Attributes:
        directory: of the model.
        rollouts: groups of `train_step_work.Rollout`.
        device: cuda or cpu.
        checkpointing: gradient checkpointing.
        rows: rows in one forward pass, where rows are computed.
        budget: places in one forward pass, where we cut.
        exact: float32 (on a CPU) in place of bfloat16.
        options: a way's own.
    """

    directory: str
    rollouts: Any
    device: str
    checkpointing: bool
    rows: int
    budget: int
    exact: bool
    options: dict[str, Any]


@dataclass
class Way:
    """A step to be timed, and what is worth knowing about it."""

    step: Callable[[], float]
    notes: dict[str, Any]


def kind(job: Job) -> Any:
    import torch

    return torch.float32 if job.exact else torch.bfloat16


def reset(job: Job) -> None:
    import gc

    import torch

    gc.collect()
    if job.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
