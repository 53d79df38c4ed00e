"""Trunks, chains and branches, joined, are attention under the tree's whole mask."""

import numpy as np
import pytest
import torch
from helpers.training import sample

from art_core.training.attention import TreeMask, dense, padded_exits
from art_core.training.attention_kernels import (
    CHAINS,
    CPU,
    DenseKernel,
    chains_of,
    in_slices,
    query_slices,
    sharing_keys,
)
from art_core.training.layout import lay_out
from art_core.training.token_tree import build_tree
from art_core.training.trunk_attention import (
    Root,
    TrunkAttention,
    chains_kernel,
    dense_kernel,
    rectangle_share,
    roots,
)

DEVICE = torch.device("cpu")
KERNEL = sharing_keys(CPU)
SLICED = in_slices(KERNEL, lambda heads, queries, keys: 4)


def exits_of(*samples: object) -> np.ndarray:
    tree = build_tree(samples)  # type: ignore[arg-type]
    exits = lay_out(tree, np.unique(tree.entries.node)).exits
    assert exits is not None
    return exits


def agent_group() -> np.ndarray:
    """Two prompts; one with branches that branch again, one with chains; and a row without company."""
    first, second = range(10, 50), range(200, 240)
    return exits_of(
        *(sample(first, [60 + i % 3, *range(70 + i, 80 + i)], step=f"a{i}") for i in range(6)),
        *(sample(second, range(100 * i, 100 * i + 9), step=f"b{i}") for i in range(3, 6)),
        sample(range(900, 920), [1, 2], step="c"),
    )


def attend(kind: object, exits: np.ndarray, seed: int = 0):
    """Output and gradients of queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    n = len(exits)
    q, factor = (torch.randn(1, n, 6, 16, generator=generator).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(1, n, 2, 16, generator=generator).transpose(1, 2) for _ in range(2))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = kind(*leaves, 0.25)  # type: ignore[operator]
    (out * factor).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("kernel", [KERNEL, SLICED], ids=["whole", "in slices"])
@pytest.mark.parametrize("chains", [CHAINS["cpu"], None])
@pytest.mark.parametrize("shortest", [1, 25, 1000])
def test_the_whole_is_attention_under_the_whole_mask(shortest: int, chains: object, kernel: DenseKernel):
    exits = padded_exits(agent_group(), 200)
    mask = TreeMask(exits, DEVICE)
    matrix = mask.dense()
    expected = attend(lambda q, k, v, scale: dense(q, k, v, matrix, scale), exits)
    found = attend(TrunkAttention(mask, kernels=(kernel, chains), shortest=shortest), exits)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("heads", "keys", "slices"),
    # The measured best on an H200: 1.62 ms whole and 1.26 ms in 4; 2.17 and 1.93 in 2; 5.71 and 5.93 in 2.
    [(9, 4000, 4), (14, 4000, 2), (28, 4000, 1)],
)
def test_queries_are_cut_so_that_few_processors_wait_at_the_end(heads: int, keys: int, slices: int):
    assert query_slices(heads, 21744, keys, 132) == slices
    assert query_slices(heads, 100, keys, 132) == 1  # too few to cut


def test_rectangles_alone_are_cut_into_slices():
    asked: list[tuple[int, int, int]] = []

    def slices(heads: int, queries: int, keys: int) -> int:
        asked.append((heads, queries, keys))
        return 2

    exits = agent_group()
    trees = [root for root in roots(exits) if root.end > root.branch]
    attend(
        TrunkAttention(TreeMask(exits, DEVICE), kernels=(in_slices(KERNEL, slices), None), shortest=1), exits
    )
    assert asked == [(6, tree.end - tree.branch, tree.branch - tree.start) for tree in trees]


def test_gradients_have_the_strides_that_compiled_layers_expect():
    exits = agent_group()
    n = len(exits)
    # As a compiled function gives them: one row, so that the stride from row to row is anybody's.
    q, k, v = (
        torch.randn(n, heads, 16)
        .as_strided((1, heads, n, 16), (heads * 16, 16, heads * 16, 1))
        .requires_grad_()
        for heads in (6, 2, 2)
    )
    kinds = TrunkAttention(TreeMask(exits, DEVICE), kernels=(KERNEL, None), shortest=1)
    seen: list[tuple[int, ...]] = []
    passed = [t.view_as(t) for t in (q, k, v)]

    def note(gradient: torch.Tensor) -> None:
        seen.append(gradient.stride())

    for t in passed:
        t.register_hook(note)
    kinds(passed[0], passed[1], passed[2], 0.25).sum().backward()
    assert sorted(seen) == sorted((n * heads * 16, 16, heads * 16, 1) for heads in (6, 2, 2))


def test_nothing_is_kept_when_no_gradient_is_wanted():
    exits = agent_group()
    with torch.no_grad():
        q = torch.randn(1, 6, len(exits), 16)
        k = torch.randn(1, 2, len(exits), 16)
        out = TrunkAttention(TreeMask(exits, DEVICE), shortest=1)(q, k, k, 0.25)
    assert not out.requires_grad


def test_trunks_go_as_far_as_nothing_branches():
    exits = exits_of(
        sample(range(10), [20, 21, 22], step="a"),
        sample(range(10), [30, 31], step="b"),
        sample(range(50, 55), [60, 61], step="c"),
    )
    assert roots(exits) == [Root(0, 10, 13), Root(13, 19, 19)]


def test_chains_are_forests_in_which_nothing_branches():
    found = chains_of(np.array([3, 3, 3, 5, 5]), DEVICE)
    assert found is not None
    assert found.bounds == [0, 3, 5]
    assert found.longest == 3
    assert chains_of(np.array([3, 2, 3]), DEVICE) is None


def test_the_share_of_rectangles_counts_long_trunks_alone():
    short = exits_of(*(sample(range(10), range(100 * i, 100 * i + 9), step=f"{i}") for i in range(1, 4)))
    long = exits_of(*(sample(range(2000), range(3000 * i, 3000 * i + 90), step=f"{i}") for i in range(1, 40)))
    assert rectangle_share(short) == 0
    assert 0.6 < rectangle_share(long) < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_prove_themselves_before_they_are_used(dtype: torch.dtype):
    q, k = torch.empty(1, 6, 1, 16, dtype=dtype), torch.empty(1, 2, 1, 16, dtype=dtype)
    assert dense_kernel(q, k) is not None
    assert chains_kernel(q, k) is not None


def test_a_kernel_that_is_wrong_is_not_chosen(monkeypatch: pytest.MonkeyPatch):
    def forgetful(*given: object):
        out, lse, kept = KERNEL.forward(*given)
        return out, lse + 1, kept

    from art_core.training import trunk_attention

    wrong = DenseKernel(forgetful, KERNEL.backward)
    monkeypatch.setattr(trunk_attention, "_chosen", {})
    monkeypatch.setitem(trunk_attention.CANDIDATES, "cpu", {"wrong": wrong})
    q, k = torch.empty(1, 6, 1, 16), torch.empty(1, 2, 1, 16)
    assert dense_kernel(q, k) is None
