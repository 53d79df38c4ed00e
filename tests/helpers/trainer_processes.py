"""What tests of trainer processes have in common: a configuration, a batch, what came of it."""

import os
import random
from pathlib import Path

import pytest
import torch
from helpers.training import group, step, trajectory
from safetensors.torch import load_file

from art_core.config import GuardrailConfig, TrainConfig
from art_core.errors import TrainerProcessError
from art_core.training.grpo import Trainer
from art_core.training.launch import TrainerProcesses
from art_core.types import TrajectoryGroup

CONFIG = TrainConfig(
    learning_rate=1e-3,
    kl_coef=0.1,
    token_budget=48,
    gradient_checkpointing=False,
    epochs=2,
    groups_per_update=2,
    guardrails=GuardrailConfig(max_kl=None, max_norm_growth=None),
)

SAID = [[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "one two three"}]]


def groups(seed: int, *, count: int = 3, members: int = 6, prompt: int = 12) -> list[TrajectoryGroup]:
    dice = random.Random(seed)
    return [
        group(
            *(
                trajectory(
                    f"{g}-{i}",
                    dice.random(),
                    step(
                        f"{g}-{i}",
                        [5, 6 + g, *range(9, 9 + prompt)],
                        completion := [dice.randint(8, 12) for _ in range(dice.randint(2, 9))],
                        logprobs=[dice.uniform(-6, -5) for _ in completion],
                        node="odd" if i % 2 else "even",
                    ),
                )
                for i in range(members)
            ),
            scenario=f"s{g}",
        )
        for g in range(count)
    ]


def adapter(trainer: Trainer | TrainerProcesses, directory: Path) -> dict[str, torch.Tensor]:
    trainer.policy.save_weights(directory)
    return load_file(directory / "adapter_model.safetensors")


def assert_ended(processes: TrainerProcesses) -> None:
    for pid in processes.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(TrainerProcessError, match="processes have ended"):
        processes.train(groups(0))
