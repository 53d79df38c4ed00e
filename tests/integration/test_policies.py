"""Whatever runs a model, and however a tree is put before it: the same log-probabilities and gradients."""

from pathlib import Path

import pytest
import torch
from helpers.tiny import Arch, tiny_model
from helpers.training import sample

from art_core.config import LoRAConfig
from art_core.errors import ConfigError
from art_core.training.forward import Kernels
from art_core.training.layout import PATHS
from art_core.training.layout import Path as LayoutPath
from art_core.training.logprobs import entry_logprobs
from art_core.training.peft_policy import PeftPolicy
from art_core.training.policy import BASE, TRAINING
from art_core.training.token_tree import TokenTree, build_tree

LORA = LoRAConfig(rank=4, alpha=8)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[Arch, Path]:
    root = tmp_path_factory.mktemp("models")
    return {arch: tiny_model(root / arch, arch) for arch in ("llama", "qwen2", "qwen3")}


def tree() -> TokenTree:
    """A trunk, a branch that branches again, a rollout of its own, and a token that two rollouts share."""
    trunk = list(range(10, 40))
    return build_tree(
        [
            sample(trunk, [5, 6, 7], step="a", rollout="a"),
            sample([*trunk, 5, 6, 7, 8, 9], [11, 12], step="b", rollout="a"),
            sample(trunk, [5, 9, 7, 3], step="c", rollout="b"),
            sample(trunk, [5, 6, 7], step="d", rollout="c"),
            sample([50, 51, 52], [53, 54, 55, 56], step="e", rollout="d"),
        ]
    )


def load(directory: Path, *, kernels: Kernels = "modules", dtype: str = "float32") -> PeftPolicy:
    policy = PeftPolicy.load(str(directory), LORA, dtype=dtype, kernels=kernels)
    with torch.no_grad():  # PEFT's B starts at zero, which would leave A without a gradient
        for i, weight in enumerate(policy.trainable_parameters()):
            weight.copy_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(i)))
    return policy


def outcome(policy: PeftPolicy, path: LayoutPath = "tree") -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities, and the gradients of a sum in which every entry has its own factor."""
    policy.path = path
    for weight in policy.trainable_parameters():
        weight.grad = None
    with policy.using(TRAINING):
        found = entry_logprobs(policy, tree(), entropy_gradient=True)
        factors = torch.linspace(0.5, 1.5, len(found.logprob))
        (factors * (found.logprob + 0.1 * found.entropy)).sum().backward()
    gradients = [w.grad for w in policy.trainable_parameters()]
    assert all(g is not None for g in gradients)
    return found.logprob.detach(), [g.clone() for g in gradients if g is not None]


def assert_same(a: object, b: object) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kernels", ["modules", "fused"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tree_packed_and_padded_rows_are_one_function(directories, arch: Arch, kernels: Kernels):
    """C25: three layouts, one loss and one gradient."""
    policy = load(directories[arch], kernels=kernels)
    expected = outcome(policy)
    for path in PATHS:
        assert_same(outcome(policy, path), expected)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_fused_kernels_are_the_models_own_modules(directories, arch: Arch):
    modules, fused = load(directories[arch]), load(directories[arch], kernels="fused")
    assert_same(outcome(fused), outcome(modules))
    for adapter in (BASE, "frozen"):
        found = []
        for policy in (modules, fused):
            if adapter is not BASE and policy.path == "tree":
                policy.snapshot(adapter)
            with torch.no_grad(), policy.using(adapter):
                found.append(entry_logprobs(policy, tree()).logprob)
        assert_same(found[1], found[0])


def test_a_trunk_apart_from_its_branches_is_the_whole_tree(directories, monkeypatch: pytest.MonkeyPatch):
    """The prompt by a dense kernel, the branches under a mask, joined by their log-sum-exps."""
    monkeypatch.setattr("art_core.training.trunk_attention.SHORTEST_TRUNK", 8)
    policy = load(directories["qwen3"], kernels="fused")
    expected = outcome(policy)
    apart = load(directories["qwen3"], kernels="fused")
    apart.attention = "trunk"
    assert_same(outcome(apart), expected)
    assert_same(outcome(apart, "packed"), expected)
    apart.gradient_checkpointing = True
    assert_same(outcome(apart), expected)


@pytest.mark.parametrize("kernels", ["modules", "fused"])
def test_checkpointing_changes_memory_and_nothing_else(directories, kernels: Kernels):
    policy = load(directories["qwen2"], kernels=kernels)
    expected = outcome(policy)
    policy.gradient_checkpointing = True
    assert_same(outcome(policy), expected)
    assert_same(outcome(policy, "padded"), expected)


def test_a_layer_under_checkpointing_keeps_its_input_alone(directories):
    kept: dict[bool, int] = {}
    for checkpointing in (False, True):
        policy = load(directories["llama"], kernels="fused")
        policy.gradient_checkpointing = checkpointing
        sizes: list[int] = []

        def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with policy.using(TRAINING), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            entry_logprobs(policy, tree())
        kept[checkpointing] = sum(sizes)
    assert kept[True] < kept[False] / 3


def test_the_mlp_runs_in_tiles_under_checkpointing(directories, monkeypatch: pytest.MonkeyPatch):
    policy = load(directories["qwen2"], kernels="fused")
    expected = outcome(policy)
    monkeypatch.setattr("art_core.training.kernels.TILE", 16)
    policy.gradient_checkpointing = True
    assert_same(outcome(policy), expected)


def test_bfloat16_kernels_agree_with_the_modules_to_that_types_precision(directories):
    modules = outcome(load(directories["llama"], dtype="bfloat16"))
    fused = outcome(load(directories["llama"], kernels="fused", dtype="bfloat16"))
    assert (modules[0] - fused[0]).abs().mean() < 0.02
    for a, b in zip(modules[1], fused[1], strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.98


def test_a_model_that_fused_kernels_do_not_know_is_refused_by_name(directories):
    policy = load(directories["llama"], kernels="fused")
    policy.model.get_base_model().config.model_type = "mystery"
    with pytest.raises(ConfigError, match="not 'mystery'"):
        outcome(policy)


def test_dropout_runs_in_the_models_own_modules(directories):
    lora = LORA.replace(dropout=0.5)
    policy = PeftPolicy.load(str(directories["llama"]), lora, dtype="float32", kernels="fused")
    with torch.no_grad():
        for weight in policy.trainable_parameters():
            weight.fill_(0.05)
    with torch.no_grad(), policy.using(TRAINING):
        still = [entry_logprobs(policy, tree()).logprob for _ in range(2)]
        with policy.dropout():
            dropping = [entry_logprobs(policy, tree()).logprob for _ in range(2)]
    assert torch.equal(*still)
    assert not torch.equal(*dropping)
