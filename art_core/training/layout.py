"""A layout: how a token tree is put before the model, and where each target is then read.

Invariant: whatever the path, a target is read at the hidden state of its parent token after exactly the
tokens before it; only what is computed twice, and what is padding, differs.

Three paths:

- ``tree``: every inner node once, in depth-first order; a token attends to its ancestors.
- ``packed``: root-to-leaf rows one after another in one row; a token attends to those before it in its
  own row. Shared prefixes are computed once for each row.
- ``padded``: root-to-leaf rows below one another, filled up on the right. Plain causal attention, which
  every engine can do.

The first two are the same thing to an attention kernel: nodes in depth-first order with the interval of
their descendants, for rows laid one after another are a tree of chains. Leaves predict nothing and are
never computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from art_core.training.token_tree import Ints, TokenTree, pieces_of, split

Path = Literal["tree", "packed", "padded"]
PATHS: tuple[Path, ...] = get_args(Path)


@dataclass(frozen=True, slots=True)
class Layout:
    """What one forward pass computes.

    Attributes:
        path: which of the three it is.
        token_ids: [rows, columns].
        positions: tokens before each token in its own path from the root  [rows, columns].
        exits: one past each place's last descendant, in a single row of places; None when every row is
            plainly causal  [columns].
        places: where each target is read: the flat index (row major) of its parent  [targets].
        chains: how many root-to-leaf chains there are.
    """

    path: Path
    token_ids: Ints
    positions: Ints
    exits: Ints | None
    places: Ints
    chains: int

    def __len__(self) -> int:
        return self.token_ids.size


def lay_out(tree: TokenTree, targets: Ints, path: Path = "tree") -> Layout:
    """Lay a tree out for one forward pass.

    Args:
        tree: what to compute.
        targets: nodes whose probability is asked for; none at depth 0  [targets].
        path: how.
    """
    return _tree(tree, targets) if path == "tree" else _rows(tree, targets, path)


def _tree(tree: TokenTree, targets: Ints) -> Layout:
    kept = np.flatnonzero(tree.inner)
    place = np.cumsum(tree.inner) - 1
    chains = len(tree.branch_starts)
    # Descendants are counted among the nodes that are computed.
    exits = np.searchsorted(kept, tree.exit[kept])
    return Layout(
        path="tree",
        token_ids=tree.token_ids[kept][None],
        positions=tree.depth[kept][None],
        exits=exits if bool((exits < len(kept)).any()) else None,
        places=place[tree.parent[targets]],
        chains=chains,
    )


def _rows(tree: TokenTree, targets: Ints, path: Path) -> Layout:
    starts = tree.branch_starts
    ends = np.append(starts[1:], len(tree))
    rows = [tree.path_to(int(end) - 1)[:-1] for end in ends]  # the last token predicts nothing
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    row_of = np.searchsorted(starts, targets, side="right") - 1
    column = tree.depth[targets] - 1
    if path == "packed":
        offsets = np.cumsum(lengths) - lengths
        nodes = np.concatenate(rows)
        exits = np.repeat(offsets + lengths, lengths)
        return Layout(
            path=path,
            token_ids=tree.token_ids[nodes][None],
            positions=tree.depth[nodes][None],
            exits=exits if len(rows) > 1 else None,
            places=offsets[row_of] + column,
            chains=len(rows),
        )
    longest = int(lengths.max())
    token_ids = np.zeros((len(rows), longest), dtype=np.int64)
    for i, row in enumerate(rows):
        token_ids[i, : len(row)] = tree.token_ids[row]
    return Layout(
        path=path,
        token_ids=token_ids,
        positions=np.tile(np.arange(longest), (len(rows), 1)),
        exits=None,
        places=row_of * longest + column,
        chains=len(rows),
    )


def cut(tree: TokenTree, budget: int, path: Path = "tree") -> list[TokenTree]:
    """Cut a tree into pieces whose layouts have at most ``budget`` places, padding included.

    Rows longer than the budget become pieces of their own.
    """
    if path == "tree":
        return split(tree, budget)
    starts = tree.branch_starts
    if not len(starts):
        return []
    ends = np.append(starts[1:], len(tree))
    lengths = tree.depth[ends - 1]
    bounds = _packed_bounds(lengths, budget) if path == "packed" else _padded_bounds(lengths, budget)
    return pieces_of(tree, bounds)


def _packed_bounds(lengths: Ints, budget: int) -> Sequence[int]:
    bounds = [0]
    used = 0
    for i, length in enumerate(lengths.tolist()):
        if used and used + length > budget:
            bounds.append(i)
            used = 0
        used += length
    return [*bounds, len(lengths)]


def _padded_bounds(lengths: Ints, budget: int) -> Sequence[int]:
    bounds = [0]
    longest = 0
    for i, length in enumerate(lengths.tolist()):
        widest = max(longest, length)
        if i > bounds[-1] and widest * (i + 1 - bounds[-1]) > budget:
            bounds.append(i)
            widest = length
        longest = widest
    return [*bounds, len(lengths)]
