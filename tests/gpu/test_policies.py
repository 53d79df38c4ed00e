"""On a GPU: every path and every kernel gives what single rows give, and what is refused says why."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny import tiny_model
from helpers.training import sample

from art_core.config import LoRAConfig
from art_core.training.layout import PATHS
from art_core.training.logprobs import entry_logprobs
from art_core.training.paths import PathChoice, probe
from art_core.training.peft_policy import PeftPolicy
from art_core.training.policy import TRAINING
from art_core.training.token_tree import TokenTree, build_tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LORA = LoRAConfig(rank=8, alpha=16)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Heads of 32: smaller ones are not for FlexAttention.
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen2", hidden=128)


def tree(prompt: int = 600, answers: int = 6) -> TokenTree:
    trunk = [10 + i % 300 for i in range(prompt)]
    return build_tree(
        [
            sample(trunk, [(7 * i + j) % 300 for j in range(90 + i)], step=f"{i}", rollout=f"{i}")
            for i in range(1, answers + 1)
        ]
    )


def outcome(policy: PeftPolicy, given: TokenTree) -> tuple[torch.Tensor, torch.Tensor]:
    for weight in policy.trainable_parameters():
        weight.grad = None
    with policy.using(TRAINING):
        found = entry_logprobs(policy, given)
        (found.logprob * torch.linspace(0.5, 1.5, len(found.logprob), device="cuda")).mean().backward()
    gradients = [w.grad.flatten() for w in policy.trainable_parameters() if w.grad is not None]
    return found.logprob.detach(), torch.cat(gradients)


def load(directory: Path, **options: object) -> PeftPolicy:
    policy = PeftPolicy.load(str(directory), LORA, dtype="bfloat16", device="cuda", **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for i, weight in enumerate(policy.trainable_parameters()):
            weight.copy_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(i)))
    return policy


@pytest.mark.parametrize("attention", ["flex", "trunk"])
@pytest.mark.parametrize("kernels", ["modules", "fused"])
def test_every_path_gives_what_rows_by_themselves_give(directory: Path, kernels: str, attention: str):
    policy = load(directory, kernels=kernels, attention=attention)
    for path in PATHS:
        assert probe(policy, path) is None


@pytest.mark.parametrize("attention", ["flex", "trunk"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_fused_trees_have_the_gradient_of_padded_rows_in_the_models_own_modules(
    directory: Path, attention: str, checkpointing: bool
):
    modules = load(directory, kernels="modules")
    modules.path = "padded"
    expected = outcome(modules, tree())
    fused = load(directory, kernels="fused", attention=attention)
    fused.gradient_checkpointing = checkpointing
    found = outcome(fused, tree())
    assert (found[0] - expected[0]).abs().mean() < 0.03
    assert torch.nn.functional.cosine_similarity(found[1], expected[1], dim=0) > 0.99


def test_inputs_kept_in_the_hosts_memory_come_back_as_they_were(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    policy = load(directory, kernels="fused")
    policy.gradient_checkpointing = True
    expected = outcome(policy, tree())
    monkeypatch.setattr("art_core.training.kept_inputs.OFFLOADED_ABOVE", 0)
    found = outcome(policy, tree())
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-3, rtol=1e-2)


def test_paths_are_measured_once_and_kept(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ART_CACHE", str(tmp_path))
    policy = load(directory)
    assert PathChoice(policy).of([tree()]) in policy.paths
    before = (tmp_path / "paths.json").read_text()
    assert np.all([path in before for path in PATHS])
    monkeypatch.setattr("art_core.training.paths.rate", lambda *_: pytest.fail("measured again"))
    assert PathChoice(load(directory)).of([tree()]) in policy.paths
