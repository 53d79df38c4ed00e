import time
from collections import Counter

import numpy as np
import pytest
import torch
from helpers.training import sample
from hypothesis import given, settings
from hypothesis import strategies as st

from art_core.training.attention import TreeMask
from art_core.training.samples import Sample, fork_rate
from art_core.training.token_tree import TokenTree, build_tree, split, to_rows

TOKENS = st.integers(0, 2)


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    size = draw(st.integers(1, 10))
    return [
        sample(
            draw(st.lists(TOKENS, min_size=1, max_size=6)),
            draw(st.lists(TOKENS, min_size=1, max_size=5)),
            advantage=draw(st.sampled_from([-1.0, 0.5, 1.0])),
            step=f"s{i}",
            rollout=f"r{i % 3}",
        )
        for i in range(size)
    ]


def path(tree: TokenTree, node: int) -> tuple[int, ...]:
    """Token ids from the root to a node, read through parents."""
    ids: list[int] = []
    while node >= 0:
        ids.append(int(tree.token_ids[node]))
        node = int(tree.parent[node])
    return tuple(reversed(ids))


def trained(*trees: TokenTree) -> Counter[tuple[object, ...]]:
    """What trees train: full path of the token, advantage; steps and rollouts by number."""
    return Counter(
        (path(tree, int(node)), advantage, int(step), int(rollout))
        for tree in trees
        for node, advantage, step, rollout in zip(
            tree.entries.node, tree.entries.advantage, tree.entries.step, tree.entries.rollout, strict=True
        )
    )


@given(batches())
def test_every_sampled_token_is_trained_once_under_the_prefix_it_was_sampled_from(batch: list[Sample]):
    tree = build_tree(batch)
    expected = Counter(
        (s.ids[: len(s.prompt) + i + 1], s.advantage) for s in batch for i in range(len(s.completion))
    )
    assert Counter(entry[:2] for entry in trained(tree).elements()) == expected


@given(batches())
def test_the_tree_holds_each_distinct_prefix_once(batch: list[Sample]):
    tree = build_tree(batch)
    prefixes = {s.ids[:i] for s in batch for i in range(1, len(s.ids) + 1)}
    paths = [path(tree, node) for node in range(len(tree))]
    assert len(paths) == len(prefixes)
    assert set(paths) == prefixes
    assert tree.depth.tolist() == [len(p) - 1 for p in paths]


@given(batches())
def test_a_node_sees_exactly_its_ancestors_and_itself(batch: list[Sample]):
    tree = build_tree(batch)
    mask = TreeMask(tree.exit, torch.device("cpu")).dense()[0, 0]
    paths = [path(tree, node) for node in range(len(tree))]
    for q, whole in enumerate(paths):
        for k, prefix in enumerate(paths):
            assert bool(mask[q, k]) == (whole[: len(prefix)] == prefix)


@given(batches(), st.randoms())
def test_the_order_of_the_samples_changes_nothing(batch: list[Sample], random):
    shuffled = list(batch)
    random.shuffle(shuffled)
    one, other = build_tree(batch), build_tree(shuffled)
    assert np.array_equal(one.token_ids, other.token_ids)
    assert np.array_equal(one.parent, other.parent)
    assert np.array_equal(one.entries.node, other.entries.node)
    assert np.array_equal(one.entries.advantage, other.entries.advantage)


@given(batches(), st.integers(1, 30))
def test_pieces_train_together_what_the_whole_trains(batch: list[Sample], budget: int):
    tree = build_tree(batch)
    pieces = split(tree, budget)
    assert trained(*pieces) == trained(tree)
    for piece in pieces:
        assert len(piece) <= budget or len(piece.branch_starts) == 1
        assert np.all(piece.depth[piece.entries.node] > 0)
        for node in range(len(piece)):
            below = [
                q for q in range(len(piece)) if path(piece, q)[: piece.depth[node] + 1] == path(piece, node)
            ]
            assert below == list(range(node, int(piece.exit[node])))


@given(batches())
def test_rows_are_single_paths_and_train_together_what_the_tree_trains(batch: list[Sample]):
    tree = build_tree(batch)
    rows = to_rows(tree)
    assert all(row.depth.tolist() == list(range(len(row))) for row in rows)
    assert trained(*rows) == trained(tree)
    assert len(rows) == len(tree.branch_starts)


def test_two_rollouts_that_sampled_the_same_token_at_the_same_place_keep_two_entries():
    tree = build_tree(
        [
            sample([1, 2], [3], advantage=1.0, logprobs=[-0.5], step="a", rollout="a"),
            sample([1, 2], [3], advantage=-1.0, logprobs=[-0.7], step="b", rollout="b"),
        ]
    )
    assert len(tree) == 3
    assert tree.entries.node.tolist() == [2, 2]
    assert tree.entries.advantage.tolist() == [-1.0, 1.0]
    assert tree.entries.old_logprob.tolist() == [-0.7, -0.5]
    assert len(set(tree.entries.rollout.tolist())) == 2


def test_one_rollouts_answer_may_be_anothers_prompt():
    """C07: the planner's tokens are trained once, although the executor's prompt quotes them."""
    planner = sample([1], [2, 3], step="plan", rollout="a")
    executor = sample([1, 2, 3, 4], [5], step="execute", rollout="a")
    tree = build_tree([executor, planner])
    assert len(tree) == 5
    assert sorted(path(tree, n) for n in tree.entries.node) == [(1, 2), (1, 2, 3), (1, 2, 3, 4, 5)]


def test_leaves_are_not_inner_nodes_and_everything_else_is():
    tree = build_tree([sample([1, 2], [3]), sample([1, 2], [4, 5])])
    assert tree.token_ids[~tree.inner].tolist() == [3, 5]


def test_a_sample_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="step s has no prompt"):
        sample([], [1])


def test_a_path_longer_than_the_budget_is_a_piece_of_its_own():
    tree = build_tree([sample(range(50), [1, 2]), sample([0, 1], [7]), sample([0, 1], [8])])
    sizes = [len(p) for p in split(tree, 10)]
    assert max(sizes) == 52
    assert sum(sizes) == 52 + 4


def test_cuts_fall_where_little_is_computed_twice():
    """Two families of 20 answers under long prompts: cut between the families, not inside them."""
    families = [
        sample([family, *range(10, 90)], [100 + i], step=f"{family}-{i}")
        for family in (1, 2)
        for i in range(20)
    ]
    tree = build_tree(families)
    pieces = split(tree, 110)
    assert [len(p) for p in pieces] == [101, 101]
    assert sum(len(p) for p in pieces) == len(tree)


def test_pieces_are_even():
    tree = build_tree([sample([1, 2, 3], [i, i, i, i]) for i in range(10, 50)])
    sizes = [len(p) for p in split(tree, 100)]
    assert max(sizes) - min(sizes) <= 4


@settings(max_examples=20)
@given(batches())
def test_fork_rate_counts_the_rows_that_each_trajectory_needs_beyond_its_first(batch: list[Sample]):
    by_rollout: dict[str, list[Sample]] = {}
    for s in batch:
        by_rollout.setdefault(s.rollout, []).append(s)
    extra = [len(to_rows(build_tree(own))) - 1 for own in by_rollout.values()]
    assert fork_rate(batch) == pytest.approx(sum(extra) / len(extra))


def test_thinking_that_the_template_drops_forks_rows_and_trains_every_token_once():
    """C20: three turns; each prompt repeats earlier answers without their thinking."""
    think, end = [90, 91, 92], [99]
    turns = [([1, 10 + i], [*think, 20 + i, *end]) for i in range(3)]
    steps: list[Sample] = []
    history: list[int] = []
    for i, (prompt, answer) in enumerate(turns):
        steps.append(sample([*history, *prompt], answer, step=f"s{i}", rollout="r"))
        history += [*prompt, *answer[len(think) :]]
    tree = build_tree(steps)
    assert len(tree.entries) == sum(len(a) for _, a in turns)
    assert sum(len(r.entries) for r in to_rows(tree)) == len(tree.entries)
    assert len(to_rows(tree)) == 3
    assert fork_rate(steps) == 2.0


def test_history_that_is_kept_needs_one_row():
    """C21: each prompt continues what the server saw; no turn is trained twice."""
    steps: list[Sample] = []
    history: list[int] = []
    for i in range(4):
        prompt = [*history, 1, 10 + i]
        steps.append(sample(prompt, [20 + i, 99], step=f"s{i}", rollout="r"))
        history = [*prompt, 20 + i, 99]
    tree = build_tree(steps)
    assert len(tree) == len(history) == 16
    assert len(to_rows(tree)) == 1
    assert len(tree.entries) == 8
    assert len(set(tree.entries.node.tolist())) == 8
    assert fork_rate(steps) == 0.0


def test_a_thousand_samples_are_laid_out_quickly():
    generator = np.random.default_rng(0)
    batch = [
        sample([*range(30), *generator.integers(0, 50, 36).tolist()], [5, 6, 7, 8], step=f"{i}")
        for i in range(1000)
    ]
    build_tree(batch)
    best = min(_seconds(lambda: build_tree(batch)) for _ in range(3))
    assert best < 1.0  # 0.04 s on one idle core


def _seconds(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
