"""Unsloth's policy, really run (on a CPU by transformers' modules, as Unsloth does there)."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny import tiny_model

from art_core.config import EngineConfig, LoRAConfig, TrainableModelConfig, TrainConfig
from art_core.errors import ConfigError

HELPER = Path(__file__).parents[1] / "helpers/unsloth_equality.py"
NEEDS_UNSLOTH = pytest.mark.skipif(find_spec("unsloth") is None, reason="Unsloth is not installed")


@NEEDS_UNSLOTH
def test_unsloth_over_rows_is_peft_over_the_tree(tmp_path: Path):
    directory = tiny_model(tmp_path / "model", "qwen2")
    done = subprocess.run(
        [sys.executable, str(HELPER), str(directory), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,  # Unsloth writes a cache into the working directory
        env={**os.environ, "HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    size = found.pop("gradient_size")
    for name, difference in found.items():
        assert difference < 1e-5 * max(1.0, size), f"{name}: {difference}"


def test_without_unsloth_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    from art_core.training import unsloth_policy

    def missing(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(unsloth_policy.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"No module named 'unsloth'.*art-langgraph\[unsloth\]"):
        unsloth_policy.UnslothPolicy.load("model", LoRAConfig())


def test_four_bits_need_a_gpu():
    from art_core.training.unsloth_policy import UnslothPolicy

    with pytest.raises(ConfigError, match="load_in_4bit needs a CUDA device"):
        UnslothPolicy.load("model", LoRAConfig(), load_in_4bit=True)


def test_the_embedded_engine_is_not_served_by_unsloth():
    from art_core.backends.making import load_policy

    config = TrainableModelConfig(base_model="model", train=TrainConfig(policy="unsloth"))
    with pytest.raises(ConfigError, match="give kind='vllm' or policy='peft'"):
        load_policy(config, EngineConfig(kind="embedded"))


def test_a_tree_is_refused_by_name():
    from art_core.training.layout import Layout
    from art_core.training.unsloth_policy import UnslothPolicy

    policy = object.__new__(UnslothPolicy)
    policy.paths = frozenset(("packed", "padded"))
    none = np.zeros((1, 1), dtype=np.int64)
    with pytest.raises(ConfigError, match="takes rows, not path='tree'"):
        policy.states(Layout("tree", none, none, None, none[0], 1))


def test_an_unsloth_that_fails_without_a_word_is_still_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    from art_core.training import unsloth_policy

    def refuse(name: str) -> None:
        raise ImportError

    monkeypatch.setattr(unsloth_policy.importlib, "import_module", refuse)
    with pytest.raises(ConfigError, match=r"policy='unsloth' needs Unsloth: ImportError\(\)\. Install"):
        unsloth_policy.import_unsloth()
