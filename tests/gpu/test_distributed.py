"""Trainer processes on two GPUs, and what memory does to passes on one.

pytest tests/gpu/test_distributed.py -s
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import LORA, tiny_policy
from helpers.tiny import tiny_model
from helpers.training import group, step, trajectory
from safetensors.torch import load_file

from art_core.config import GuardrailConfig, ParallelConfig, Strategy, TrainConfig
from art_core.training.footprint import LARGEST, SMALLEST, available_memory, found_budget
from art_core.training.forward import Kernels
from art_core.training.grpo import Trainer
from art_core.training.launch import TrainerProcesses
from art_core.training.ranks import Alone
from art_core.types import TrajectoryGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

CONFIG = TrainConfig(
    learning_rate=1e-3,
    kl_coef=0.1,
    token_budget=512,
    gradient_checkpointing=False,
    guardrails=GuardrailConfig(max_kl=None, max_norm_growth=None),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_model(tmp_path_factory.mktemp("model"), layers=4, hidden=256)
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 70_000}))
    return directory


@pytest.fixture
def whole_gpu() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


def groups(seed: int, *, prompt: int = 200, answer: int = 60) -> list[TrajectoryGroup]:
    dice = random.Random(seed)
    return [
        group(
            *(
                trajectory(
                    f"{g}-{i}",
                    dice.random(),
                    step(
                        f"{g}-{i}",
                        [5, *[6 + g] * prompt],
                        [dice.randint(8, 300) for _ in range(answer)],
                        logprobs=[-5.5] * answer,
                    ),
                )
                for i in range(8)
            ),
            scenario=f"s{g}",
        )
        for g in range(4)
    ]


@TWO
@pytest.mark.parametrize(
    ("strategy", "kernels", "checkpointing"),
    [
        ("ddp", "fused", False),
        ("fsdp2", "fused", False),
        ("fsdp2", "fused", True),
        ("fsdp2", "fused", "auto"),
        ("fsdp2", "modules", "auto"),
    ],
)
def test_two_gpus_make_the_gradients_and_weights_of_one(
    model: Path, tmp_path: Path, strategy: Strategy, kernels: Kernels, checkpointing: Any
):
    """In float32, the gradients to 1e-5."""
    build = tiny_policy(model, tmp_path / "no-faults", kernels)
    alone = Trainer(build("cuda:0"), CONFIG)
    expected = alone.train(groups(0))
    alone.policy.save_weights(tmp_path / "theirs")
    moments = alone.state_dict()["optimizer"]["adamw"]["state"]
    parallel = ParallelConfig(processes=2, strategy=strategy, timeout=120)
    config = CONFIG.replace(gradient_checkpointing=checkpointing)
    together = TrainerProcesses(build, LORA, config, parallel, log_dir=tmp_path)
    try:
        found = together.train(groups(0))
        assert not found.events  # so small a model fits, which is foreseen
        theirs = together.state_dict()["optimizer"]["adamw"]["state"]
        together.policy.save_weights(tmp_path / "ours")
        if strategy == "fsdp2":
            assert together.description.held < 0.75 * together.description.parameters
    finally:
        together.close()
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=1e-5)
    assert found.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-3)
    for at, moment in moments.items():
        torch.testing.assert_close(
            10 * theirs[at]["exp_avg"].cpu(), 10 * moment["exp_avg"].cpu(), atol=1e-5, rtol=1e-3
        )
    mine, reference = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
    for name, weight in reference.items():
        torch.testing.assert_close(mine[name], weight, atol=1e-4, rtol=1e-3)


def test_real_out_of_memory_lowers_the_budget_and_gives_the_same_gradient(
    model: Path, tmp_path: Path, whole_gpu: None
):
    build = tiny_policy(model, tmp_path / "no-faults")
    data = groups(1, prompt=400, answer=500)
    unharmed = Trainer(build("cuda:0"), CONFIG.replace(token_budget=1024))
    expected = unharmed.train(data)
    harmed = Trainer(build("cuda:0"), CONFIG.replace(token_budget=65_536))
    peak = _peak_of(lambda: Trainer(build("cuda:0"), CONFIG.replace(token_budget=2048)).train(data))
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 1.3 * peak / total), 0)
    report = harmed.train(data)
    assert "token_budget_lowered" in [event.kind for event in report.events]
    assert report.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-3)


def _peak_of(work) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(0)
    work()
    return torch.cuda.max_memory_reserved(0)


def test_the_budget_that_is_found_fits(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ART_CACHE", str(tmp_path))
    policy = tiny_policy(model, tmp_path / "no-faults")("cuda:0")
    budget = found_budget(policy, Alone())
    assert SMALLEST <= budget <= LARGEST
    assert available_memory(policy.device) > 0
    trainer = Trainer(policy, CONFIG.replace(token_budget="auto"))
    report = trainer.train(groups(2, prompt=1000, answer=1000))
    assert report.updated
    assert not report.events


def test_a_trajectory_of_sixty_four_thousand_tokens_trains(model: Path, tmp_path: Path):
    dice = random.Random(0)
    ids = [dice.randint(5, 300) for _ in range(64_000)]
    turns = [
        step(f"t{i}", ids[: 2000 * i + 1000], ids[2000 * i + 1000 : 2000 * (i + 1)], logprobs=[-5.5] * 1000)
        for i in range(32)
    ]
    short = trajectory("short", 0.0, step("short", [5, 6], [7], logprobs=[-5.5]))
    trainer = Trainer(
        tiny_policy(model, tmp_path / "no-faults")("cuda:0"), CONFIG.replace(gradient_checkpointing=True)
    )
    report = trainer.train([group(trajectory("long", 1.0, *turns), short)])
    assert report.metrics["entries"] == 32_001
    assert report.updated
