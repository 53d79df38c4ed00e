"""Layouts read every target after exactly the tokens before it, and masks say who sees whom."""

import numpy as np
import pytest
import torch
from helpers.training import sample
from hypothesis import given, settings
from hypothesis import strategies as st

from art_core.training.attention import TreeMask, block_kinds, causal, flex, padded_exits
from art_core.training.layout import PATHS, Layout, Path, cut, lay_out
from art_core.training.samples import Sample
from art_core.training.token_tree import TokenTree, build_tree

TOKENS = st.integers(0, 2)
CPU = torch.device("cpu")


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    return [
        sample(
            draw(st.lists(TOKENS, min_size=1, max_size=6)),
            draw(st.lists(TOKENS, min_size=1, max_size=5)),
            step=f"s{i}",
            rollout=f"r{i % 3}",
        )
        for i in range(draw(st.integers(1, 8)))
    ]


def path(tree: TokenTree, node: int) -> tuple[int, ...]:
    return tuple(tree.token_ids[tree.path_to(node)].tolist())


def seen_from(layout: Layout, place: int) -> tuple[int, ...]:
    """The tokens that a place attends to, itself last."""
    row, column = divmod(place, layout.token_ids.shape[1])
    ids = layout.token_ids[row]
    if layout.exits is None:
        return tuple(ids[: column + 1].tolist())
    return tuple(int(ids[k]) for k in range(column + 1) if column < layout.exits[k])


@pytest.mark.parametrize("how", PATHS)
@given(batch=batches())
def test_a_target_is_read_after_exactly_the_tokens_before_it(how: Path, batch: list[Sample]):
    tree = build_tree(batch)
    targets = np.unique(tree.entries.node)
    layout = lay_out(tree, targets, how)
    for target, place in zip(targets.tolist(), layout.places.tolist(), strict=True):
        before = path(tree, target)[:-1]
        assert seen_from(layout, place) == before
        assert layout.positions.reshape(-1)[place] == len(before) - 1


@pytest.mark.parametrize("how", PATHS)
@given(batch=batches(), budget=st.integers(1, 30))
def test_pieces_keep_to_the_budget_and_train_everything_once(how: Path, batch: list[Sample], budget: int):
    tree = build_tree(batch)
    pieces = cut(tree, budget, how)
    found = sorted(path(p, int(n)) for p in pieces for n in p.entries.node)
    assert found == sorted(path(tree, int(n)) for n in tree.entries.node)
    for piece in pieces:
        layout = lay_out(piece, np.unique(piece.entries.node), how)
        assert len(layout) <= budget or len(piece.branch_starts) == 1


@given(batches(), st.integers(1, 4), st.integers(0, 5))
def test_blocks_are_empty_mixed_or_full_as_the_matrix_says(batch: list[Sample], size: int, padding: int):
    tree = build_tree(batch)
    layout = lay_out(tree, np.unique(tree.entries.node))
    exits = layout.exits if layout.exits is not None else np.full(len(layout), len(layout))
    exits = padded_exits(exits, len(exits) + padding)
    matrix = TreeMask(exits, CPU).dense()[0, 0].numpy()
    some, whole = block_kinds(exits, size)
    for q in range(len(some)):
        for k in range(len(some)):
            block = matrix[q * size : (q + 1) * size, k * size : (k + 1) * size]
            assert some[q, k] == block.any()
            # A block that is not known to be full is only slower.
            assert not whole[q, k] or block.all()


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000))
def test_flex_attention_under_the_block_mask_is_sdpa_under_the_matrix(seed: int):
    generator = torch.Generator().manual_seed(seed)
    trunk, branch = 40, 30
    tree = build_tree(
        [sample(range(trunk), range(100 * i, 100 * i + branch), step=f"s{i}") for i in range(1, 4)]
    )
    exits = lay_out(tree, np.unique(tree.entries.node)).exits
    assert exits is not None
    mask = TreeMask(padded_exits(exits, 160), CPU)
    q = torch.randn(1, 6, 160, 16, generator=generator)
    k, v = (torch.randn(1, 2, 160, 16, generator=generator) for _ in range(2))
    shared = [t.repeat_interleave(3, dim=1) for t in (k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(q, *shared, attn_mask=mask.dense())
    torch.testing.assert_close(flex(q, k, v, mask.blocks(32), None), expected)


def test_causal_attention_needs_no_mask():
    q, k, v = (torch.randn(2, 2, 7, 8) for _ in range(3))
    whole = torch.tril(torch.ones(7, 7, dtype=torch.bool))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=whole)
    torch.testing.assert_close(causal(q, k, v, None), expected)
