"""How trees are cut and dealt to ranks."""

import numpy as np
import torch
from helpers.training import sample
from hypothesis import given, settings
from hypothesis import strategies as st

from art_core.training.balance import cost, cut, deal, makespan, share
from art_core.training.samples import Sample
from art_core.training.token_tree import build_tree, split


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    tokens = st.integers(5, 8)
    return [
        sample(
            draw(st.lists(tokens, min_size=1, max_size=12)),
            draw(st.lists(tokens, min_size=1, max_size=6)),
            step="the same" if draw(st.booleans()) else f"s{i}",
            rollout=f"r{i % 3}",
        )
        for i in range(draw(st.integers(1, 10)))
    ]


@given(batches(), st.integers(1, 40), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_every_entry_is_in_exactly_one_rank_s_pieces_and_ranks_make_equally_many_passes(
    samples: list[Sample], budget: int, ranks: int
):
    tree = build_tree(samples)
    tree = tree.with_weights(np.arange(1.0, len(tree.entries) + 1))
    shares = [share(tree, budget, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert len({len(s.pieces) for s in shares}) == 1
    seen: list[int] = []
    for s in shares:
        for i, (piece, places) in enumerate(zip(s.pieces, s.places, strict=True)):
            if i >= s.own:
                assert piece.entries.weight.tolist() == [0.0]
                continue
            seen += places.tolist()
            # The piece's entries are the tree's, of the same tokens at the same depth.
            whole = tree.entries.take(places)
            assert piece.entries.weight.tolist() == whole.weight.tolist()
            assert np.array_equal(piece.token_ids[piece.entries.node], tree.token_ids[whole.node])
            assert np.array_equal(piece.depth[piece.entries.node], tree.depth[whole.node])
            assert np.array_equal(piece.entries.old_logprob, whole.old_logprob)
    assert sorted(seen) == list(range(len(tree.entries)))


@given(batches(), st.integers(1, 40), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_what_the_ranks_put_in_place_adds_up_to_the_whole(samples: list[Sample], budget: int, ranks: int):
    tree = build_tree(samples)
    values = torch.arange(1.0, len(tree.entries) + 1)
    total = torch.zeros(len(tree.entries))
    for rank in range(ranks):
        mine = share(tree, budget, rank=rank, ranks=ranks)
        total += mine.whole([mine.part(i, values) for i in range(len(mine.pieces))])
    assert torch.equal(total, values)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 3))
@settings(deadline=None)
def test_the_busiest_rank_has_at_most_a_third_more_than_the_best_possible(costs: list[int], ranks: int):
    best = min(_loads(costs, ranks, [0] * ranks))
    assert makespan(costs, ranks) <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9
    assert sorted(i for own in deal(costs, ranks) for i in own) == list(range(len(costs)))


def _loads(costs: list[int], ranks: int, loads: list[int]) -> list[int]:
    """The busiest rank's load of every way to deal."""
    if not costs:
        return [max(loads)]
    found: list[int] = []
    for rank in range(ranks):
        dealt = [*loads]
        dealt[rank] += costs[0]
        found += _loads(costs[1:], ranks, dealt)
        if not loads[rank]:  # empty ranks are alike
            break
    return found


def test_a_tree_that_fits_one_pass_is_still_cut_for_two_ranks():
    samples = [sample([5, 6], range(10, 60 + i), step=f"s{i}", rollout=f"r{i}") for i in range(2)] + [
        sample([7, 8], range(10, 60 + i), step=f"t{i}", rollout=f"q{i}") for i in range(2)
    ]
    long = [sample([i, *range(9, 409)], [5, 6, 7], step=f"{i}", rollout=f"{i}") for i in range(8)]
    for batch in (samples, long):
        tree = build_tree(batch)
        alone = [cost(p) for p in split(tree, 1 << 20)]
        assert len(alone) == 1
        together = makespan([cost(p) for p in cut(tree, 1 << 20, 2)], 2)
        assert together < (0.65 if batch is long else 0.8) * alone[0]


def test_a_tree_that_is_one_path_is_one_rank_s_work():
    tree = build_tree([sample([5] * 100, [6] * 50)])
    first, second = (share(tree, 64, rank=rank, ranks=2) for rank in range(2))
    assert (first.own, second.own) == (1, 0)
    assert len(second.pieces) == 1
