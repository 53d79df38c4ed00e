"""Paths are probed, not believed; of those that are right the fastest is taken."""

from pathlib import Path

import pytest
import torch
from helpers.tiny import tiny_model
from helpers.training import sample

from art_core.config import LoRAConfig, TrainConfig
from art_core.errors import ConfigError
from art_core.training.layout import PATHS, Layout
from art_core.training.layout import Path as LayoutPath
from art_core.training.paths import PathChoice, places, probe
from art_core.training.peft_policy import PeftPolicy
from art_core.training.ranks import Alone
from art_core.training.token_tree import TokenTree, build_tree

LORA = LoRAConfig(rank=4, alpha=8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


class Careless(PeftPolicy):
    """Takes whatever it is given, and ignores who sees whom."""

    def states(self, layout: Layout) -> torch.Tensor:
        plain = Layout("padded", layout.token_ids, layout.positions, None, layout.places, layout.chains)
        return super().states(plain)


class TreesAreWrong(PeftPolicy):
    """Ignores the mask of trees alone."""

    def states(self, layout: Layout) -> torch.Tensor:
        if layout.path == "tree" and layout.exits is not None:
            layout = Layout("padded", layout.token_ids, layout.positions, None, layout.places, layout.chains)
        return super().states(layout)


def group(answers: int = 4, prompt: int = 30, answer: int = 5) -> TokenTree:
    return build_tree(
        [
            sample(range(prompt), range(100 * i, 100 * i + answer), step=f"{i}", rollout=f"{i}")
            for i in range(1, answers + 1)
        ]
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_gives_what_single_rows_give_passes(directory: Path, path: LayoutPath, dtype: str):
    policy = PeftPolicy.load(str(directory), LORA, dtype=dtype)
    assert probe(policy, path) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_that_ignores_who_sees_whom_is_caught(directory: Path, dtype: str):
    """C25: an engine that is given a mask and does not use it (ART 666) is not trusted."""
    policy = Careless.load(str(directory), LORA, dtype=dtype, kernels="fused")
    assert "away" in (probe(policy, "tree") or "")
    assert "away" in (probe(policy, "packed") or "")
    assert probe(policy, "padded") is None  # there plain causality is all it takes


def test_what_fails_the_probe_is_left_for_what_does_not(directory: Path, caplog: pytest.LogCaptureFixture):
    policy = TreesAreWrong.load(str(directory), LORA, dtype="float32")
    assert PathChoice(policy).of([group()]) == "packed"
    assert "path 'tree' is not used with this model" in caplog.text


def test_asking_for_a_path_that_is_wrong_is_an_error(directory: Path):
    policy = TreesAreWrong.load(str(directory), LORA, dtype="float32")
    with pytest.raises(ConfigError, match="TreesAreWrong does not compute what single rows give"):
        PathChoice(policy, "tree").of([group()])


def test_asking_for_a_path_that_the_policy_has_not_is_an_error(directory: Path):
    policy = PeftPolicy.load(str(directory), LORA, dtype="float32")
    policy.paths = frozenset(("padded",))
    with pytest.raises(ConfigError, match="path='tree': PeftPolicy takes padded"):
        PathChoice(policy, "tree").of([group()])
    assert PathChoice(policy).of([group()]) == "padded"


def test_without_a_gpu_the_tree_is_taken_as_it_has_the_fewest_places(directory: Path):
    policy = PeftPolicy.load(str(directory), LORA, dtype="float32")
    assert PathChoice(policy).of([group()]) == "tree"


def test_each_batch_takes_the_path_on_which_its_own_places_take_the_least_time(directory: Path):
    policy = PeftPolicy.load(str(directory), LORA, dtype="float32")
    choice = PathChoice(policy)
    choice._rates = {"tree": 100.0, "padded": 200.0}  # as if measured: rows are twice as fast for each place
    assert choice.of([group(answers=16, prompt=200)]) == "tree"
    assert choice.of([group(answers=2, prompt=2, answer=50)]) == "padded"


def test_places_are_what_the_layouts_have():
    tree = group(answers=3, prompt=10, answer=4)
    assert places(tree, "tree") == 10 + 3 * 3
    assert places(tree, "packed") == places(tree, "padded") == 3 * 13


def test_what_is_wrong_on_one_process_is_taken_on_none(directory: Path):
    class Two(Alone):
        size = 2

        def sum(self, values: torch.Tensor) -> torch.Tensor:
            # On the other process the tree fails.
            other = torch.ones_like(values)
            other[0] = 1 if values.dtype == torch.int64 else 0
            if values.dtype == torch.int64:
                other[1:] = 0
            return values + other

    policy = PeftPolicy.load(str(directory), LORA, dtype="float32")
    choice = PathChoice(policy, ranks=Two())
    assert choice._agreed({"tree": 5.0, "packed": 3.0}) == {"packed": 4.0}


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="load_in_4bit is Unsloth's"):
        TrainConfig(load_in_4bit=True)
    with pytest.raises(ConfigError, match="Unsloth's attention takes rows"):
        TrainConfig(policy="unsloth", path="tree")
