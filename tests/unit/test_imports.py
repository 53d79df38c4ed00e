"""What an agent's process has to load: the base install has neither torch nor vLLM."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "peft", "vllm", "unsloth", "trl")


@pytest.mark.parametrize(
    "statement",
    [
        "import art_core",
        "from art_core import LocalBackend, TrainableModel; TrainableModel(base_model='m'); LocalBackend()",
        "from art_core.inference.gateway import Gateway",
        "from art_core.store import Store",
        "from art_langgraph import ChatART, TrajectoryCallbackHandler, Workers, agather, capture",
    ],
)
def test_the_base_install_loads_no_deep_learning_library(statement: str) -> None:
    check = f"import sys; {statement}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip()
