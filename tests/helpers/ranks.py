"""What trainer processes are asked to build in tests; they find it here by its name."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from art_core.config import LoRAConfig
from art_core.training.forward import Kernels
from art_core.training.full_policy import FullPolicy
from art_core.training.layout import Layout
from art_core.training.peft_policy import PeftPolicy

LORA = LoRAConfig(rank=4, alpha=8)


class FaultyPolicy(PeftPolicy):
    """Runs out of memory, or fails, when a file says so."""

    faults: Path

    def states(self, layout: Layout) -> torch.Tensor:
        if self.faults.exists():
            fault = json.loads(self.faults.read_text())
            if fault["rank"] in (None, int(os.environ.get("RANK", "0"))):
                size = len(layout)
                if size > fault.get("most_tokens", size):
                    raise torch.OutOfMemoryError(f"CUDA out of memory. {size} tokens were tried")
                if "message" in fault:
                    raise ValueError(fault["message"])
        return super().states(layout)


def set_fault(faults: Path, *, rank: int | None = None, **fault: Any) -> None:
    """From now on a rank (None: each) fails: above ``most_tokens`` in one pass, or with a ``message``."""
    scratch = faults.with_suffix(".new")
    scratch.write_text(json.dumps({"rank": rank, **fault}))
    scratch.rename(faults)


def tiny_policy(
    directory: Path, faults: Path, kernels: Kernels = "auto", lora: LoRAConfig = LORA
) -> Callable[[str], PeftPolicy]:
    """What builds a policy whose adapter already changes the model, in float32."""
    return partial(_load, str(directory), str(faults), kernels, lora)


def _load(directory: str, faults: str, kernels: Kernels, lora: LoRAConfig, device: str) -> PeftPolicy:
    policy = FaultyPolicy.load(directory, lora, dtype="float32", device=device, kernels=kernels)
    policy.faults = Path(faults)  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(device))
    return policy


def full_policy(directory: Path) -> Callable[[str], FullPolicy]:
    """What builds a policy of which all weights are trained, in float32."""
    return partial(_load_full, str(directory))


def _load_full(directory: str, device: str) -> FullPolicy:
    return FullPolicy.load(directory, dtype="float32", device=device)
