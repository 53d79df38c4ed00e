"""A rank's share: the pieces of a token tree that one process of several computes.

Invariant: over all ranks, every entry of the tree is in exactly one piece; and all ranks make the same
number of forward passes.

A tree is cut so that the busiest rank has least to do (`cut`), its pieces are dealt to the ranks (`deal`),
and a rank with fewer pieces than others gets `padding`: passes that add nothing, but keep those
collectives in step that a sharded model runs within them. One process alone is the case of one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from art_core.training import layout
from art_core.training.layout import Path
from art_core.training.token_tree import PIECE_OVERHEAD, Entries, Ints, TokenTree


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a tree.

    Attributes:
        pieces: what it computes; padding last.
        places: for each piece, where its entries are among the whole tree's; for padding, any place.
        own: how many pieces are not padding.
        entries: how many the whole tree has.
    """

    pieces: tuple[TokenTree, ...]
    places: tuple[Ints, ...]
    own: int
    entries: int

    def part(self, piece: int, whole: Tensor) -> Tensor:
        """A piece's entries' values out of the whole tree's  [entries] -> [the piece's entries]."""
        return whole[torch.from_numpy(self.places[piece]).to(whole.device)]

    def counted(self, piece: int, loss: Tensor) -> Tensor:
        """A piece's loss; of padding, nothing, but with a backward pass like every other."""
        return loss if piece < self.own else 0.0 * loss

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Values of the pieces' entries put in their places; entries of other ranks are 0.

        Args:
            parts: for each piece, padding too  [its entries].

        Returns:
            [entries of the whole tree].
        """
        found = parts[0].new_zeros(self.entries)
        if not self.own:
            return found
        at = torch.from_numpy(np.concatenate(self.places[: self.own])).to(found.device)
        return found.index_copy(0, at, torch.cat(list(parts[: self.own])))


def share(tree: TokenTree, token_budget: int, *, path: Path = "tree", rank: int = 0, ranks: int = 1) -> Share:
    """What a rank computes of a tree; the same call on every rank gives shares that fit together.

    Args:
        tree: the whole tree, equal on all ranks.
        token_budget: most places of a piece's layout.
        path: how pieces are put before the model.
        rank: which one.
        ranks: how many there are.
    """
    numbered = replace(
        tree, entries=replace(tree.entries, old_logprob=np.arange(len(tree.entries), dtype=np.float64))
    )
    pieces = cut(numbered, token_budget, ranks, path)
    dealt = deal([cost(piece, path) for piece in pieces], ranks)
    places = [pieces[i].entries.old_logprob.astype(np.int64) for i in dealt[rank]]
    own = [
        replace(pieces[i], entries=replace(tree.entries.take(at), node=pieces[i].entries.node))
        for i, at in zip(dealt[rank], places, strict=True)
    ]
    missing = max(len(theirs) for theirs in dealt) - len(own)
    return Share(
        (*own, *[padding(tree)] * missing),
        (*places, *[np.zeros(1, dtype=np.int64)] * missing),
        len(own),
        len(tree.entries),
    )


def cost(piece: TokenTree, path: Path = "tree") -> float:
    """What a forward and backward pass over a piece costs, in places of its layout."""
    if path == "tree":
        return PIECE_OVERHEAD + len(piece)
    leaves = np.append(piece.branch_starts[1:], len(piece)) - 1
    return PIECE_OVERHEAD + float((piece.depth[leaves] + 1).sum())


def cut(tree: TokenTree, token_budget: int, ranks: int, path: Path = "tree") -> list[TokenTree]:
    """Cut a tree so that, dealt to the ranks, the busiest of them has least to do.

    Smaller pieces balance better, larger ones repeat fewer ancestors: a few sizes between a fraction of
    a rank's part and the budget are tried.

    Args:
        tree: what to cut.
        token_budget: most places of a piece's layout, as in `layout.cut`.
        ranks: how many share it.
        path: how pieces are put before the model.
    """
    if ranks == 1 or not len(tree):
        return layout.cut(tree, token_budget, path)
    part = (cost(tree, path) - PIECE_OVERHEAD) / ranks
    sizes = {min(token_budget, max(16, int(part * scale))) for scale in (4.0, 2.0, 1.5, 1.1, 0.8, 0.55, 0.35)}
    cuts = [layout.cut(tree, size, path) for size in sorted({token_budget, *sizes}, reverse=True)]
    return min(cuts, key=lambda pieces: makespan([cost(piece, path) for piece in pieces], ranks))


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Deal things to ranks so that their sums are close: the longest first, each to whoever has least.

    (Longest processing time first: Graham 1969, "Bounds on multiprocessing timing anomalies"; the busiest
    rank has at most 4/3 of the optimum.)

    Args:
        costs: of each thing.
        ranks: how many.

    Returns:
        For each rank the numbers of its things, in their order.
    """
    loads = [0.0] * ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[least] += costs[i]
        dealt[least].append(i)
    return [sorted(own) for own in dealt]


def makespan(costs: Sequence[float], ranks: int) -> float:
    """What the busiest rank has to do when things are dealt."""
    return max((sum(costs[i] for i in own) for own in deal(costs, ranks)), default=0.0)


def padding(tree: TokenTree) -> TokenTree:
    """Two tokens of a tree with one entry that weighs nothing."""
    one = np.zeros(1)
    return TokenTree(
        token_ids=np.repeat(tree.token_ids[:1], 2),
        parent=np.array([-1, 0]),
        depth=np.array([0, 1]),
        exit=np.array([2, 2]),
        entries=Entries(np.array([1]), one, one, one, np.array([0]), np.array([0]), np.ones(1)),
        tokens_total=2,
    )
