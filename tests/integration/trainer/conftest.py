"""Tiny random models of real architectures, in float32, and policies of them."""

from pathlib import Path

import pytest
from helpers.tiny import tiny_model
from helpers.tiny_policies import load

from art_core.training.peft_policy import PeftPolicy


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": tiny_model(root / "llama", arch="llama"),
        "qwen3": tiny_model(root / "qwen3", arch="qwen3"),
        # Wide, so that its (tied) embeddings let it become certain of a token.
        "learner": tiny_model(root / "learner", arch="llama", layers=1, hidden=256),
    }


@pytest.fixture(scope="module")
def policies(models: dict[str, Path]) -> dict[str, PeftPolicy]:
    return {name: load(directory) for name, directory in models.items()}


@pytest.fixture
def policy(models: dict[str, Path]) -> PeftPolicy:
    return load(models["llama"], awake=False)
