"""The token tree: every prompt and completion of a batch in one trie of token ids.

Invariant: nodes are numbered in depth-first order, so the descendants of node ``k`` (itself included)
are exactly ``k <= q < exit[k]``; and every sampled token has exactly one entry, in the whole tree as in
its pieces and rows.

``build_tree`` lays samples into the tree; ``split`` cuts it to a budget; ``to_rows`` walks it root to
leaf for engines without custom masks. A piece, and a row, is again a tree: ancestors are repeated as
context, entries never are.

Two facts carry all of it. In lexicographic order each sample shares its longest prefix with the one
before it, so appending what is new gives depth-first order. And for any range ``[a, b)`` of that order
the ancestors that lie outside the range are the ancestors of ``a``, so a piece is "the path to ``a``,
then the range".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from art_core.training.samples import Sample, canonical

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Entries:
    """What is trained: one entry for each sampled token, as columns.

    Two rollouts that sampled the same token at the same place share a node and keep two entries.

    Attributes:
        node: the token's node; never one of depth 0  [entries].
        old_logprob: its log-probability under the policy that sampled it; NaN where unknown  [entries].
        advantage: of its rollout  [entries].
        weight: factor of its loss in the sum  [entries].
        step: number of its step, counted over the whole batch  [entries].
        rollout: number of its rollout, counted over the whole batch  [entries].
        temperature: of the softmax that it is a draw from  [entries].
    """

    node: Ints
    old_logprob: Floats
    advantage: Floats
    weight: Floats
    step: Ints
    rollout: Ints
    temperature: Floats

    def __len__(self) -> int:
        return len(self.node)

    def take(self, chosen: Bools | Ints) -> "Entries":
        """Some of them, in order."""
        return Entries(
            self.node[chosen],
            self.old_logprob[chosen],
            self.advantage[chosen],
            self.weight[chosen],
            self.step[chosen],
            self.rollout[chosen],
            self.temperature[chosen],
        )


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A trie of token ids in depth-first order; several first tokens make a forest.

    Attributes:
        token_ids: [nodes].
        parent: node before it; -1 at depth 0  [nodes].
        depth: tokens before it: its position  [nodes].
        exit: one past its last descendant  [nodes].
        entries: what is trained.
        tokens_total: tokens that the samples hold, shared ones counted each time.
    """

    token_ids: Ints
    parent: Ints
    depth: Ints
    exit: Ints
    entries: Entries
    tokens_total: int

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def branch_starts(self) -> Ints:
        """Nodes that do not continue the node before them: where each row's own part begins  [leaves]."""
        starts = self.parent != np.arange(len(self)) - 1
        starts[:1] = True
        return np.flatnonzero(starts)

    def path_to(self, node: int) -> Ints:
        """Nodes from the root to a node, that one included  [depth + 1]."""
        return np.append(_ancestors(self, node), node)

    @property
    def inner(self) -> Bools:
        """Nodes with children: the only ones whose hidden states predict something  [nodes]."""
        return self.exit > np.arange(len(self)) + 1

    @property
    def unique_share(self) -> float:
        """Nodes per token: 1 when nothing is shared."""
        return len(self) / self.tokens_total if self.tokens_total else 1.0

    def with_weights(self, weight: Floats) -> "TokenTree":
        """The same tree with other weights  [entries]."""
        return replace(self, entries=replace(self.entries, weight=weight))


def build_tree(samples: Sequence[Sample]) -> TokenTree:
    """Lay samples into one tree; all weights are 1.

    The result does not depend on the samples' order.
    """
    ordered = canonical(samples)
    tokens: list[Ints] = []
    parents: list[Ints] = []
    depths: list[Ints] = []
    entry_nodes: list[Ints] = []
    before = path = np.empty(0, dtype=np.int64)
    size = 0
    for sample in ordered:
        ids = sample.row
        shared = _common_prefix(before, ids)
        fresh = np.arange(size, size + len(ids) - shared)
        if len(fresh):
            path = np.concatenate([path[:shared], fresh])
            tokens.append(ids[shared:])
            parents.append(np.concatenate([path[shared - 1 : shared] if shared else [-1], fresh[:-1]]))
            depths.append(np.arange(shared, len(ids)))
            size += len(fresh)
            before = ids
        entry_nodes.append(path[len(sample.prompt) : len(ids)])
    depth = _joined(depths)
    return TokenTree(
        token_ids=_joined(tokens),
        parent=_joined(parents),
        depth=depth,
        exit=_exits(depth),
        entries=_entries(ordered, entry_nodes),
        tokens_total=sum(len(s.prompt) + len(s.completion) for s in ordered),
    )


def _common_prefix(a: Ints, b: Ints) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _exits(depth: Ints) -> Ints:
    """One past each node's last descendant: the next node that is not deeper.

    Nodes go by runs, in which each is the child of the one before it; only a run's first node ends others.
    """
    exits = np.full(len(depth), len(depth), dtype=np.int64)
    starts = np.flatnonzero(np.diff(depth, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(depth))
    # The path from the root, in parts of runs: first node, its depth, how many nodes.
    path: list[tuple[int, int, int]] = []
    for start, level, length in zip(starts.tolist(), depth[starts].tolist(), lengths.tolist(), strict=True):
        while path and path[-1][1] + path[-1][2] > level:
            first, top, nodes = path.pop()
            kept = max(0, level - top)
            exits[first + kept : first + nodes] = start
            if kept:
                path.append((first, top, kept))
        path.append((start, level, length))
    return exits


def _entries(ordered: Sequence[Sample], nodes: list[Ints]) -> Entries:
    lengths = [len(s.completion) for s in ordered]
    steps = {name: i for i, name in enumerate(dict.fromkeys(s.step for s in ordered))}
    rollouts = {name: i for i, name in enumerate(dict.fromkeys(s.rollout for s in ordered))}
    old = [np.nan if p is None else p for s in ordered for p in s.logprobs]
    return Entries(
        node=_joined(nodes),
        old_logprob=np.array(old, dtype=np.float64),
        advantage=np.repeat(np.array([s.advantage for s in ordered], dtype=np.float64), lengths),
        weight=np.ones(len(old), dtype=np.float64),
        step=np.repeat(np.array([steps[s.step] for s in ordered], dtype=np.int64), lengths),
        rollout=np.repeat(np.array([rollouts[s.rollout] for s in ordered], dtype=np.int64), lengths),
        temperature=np.repeat(np.array([s.temperature for s in ordered], dtype=np.float64), lengths),
    )


def _ancestors(tree: TokenTree, node: int) -> Ints:
    path = np.empty(int(tree.depth[node]), dtype=np.int64)
    for i in range(len(path) - 1, -1, -1):
        node = int(tree.parent[node])
        path[i] = node
    return path


def _piece(tree: TokenTree, start: int, end: int) -> TokenTree:
    """Nodes ``[start, end)`` with their entries, under the path that leads to ``start``."""
    kept = np.concatenate([_ancestors(tree, start), np.arange(start, end)])
    depth = tree.depth[kept]
    chosen = (tree.entries.node >= start) & (tree.entries.node < end)
    entries = tree.entries.take(chosen)
    shift = np.int64(len(kept) - end)
    place = np.full(len(tree) + 1, -1, dtype=np.int64)
    place[kept] = np.arange(len(kept))
    return TokenTree(
        token_ids=tree.token_ids[kept],
        parent=place[tree.parent[kept]],
        depth=depth,
        exit=_exits(depth),
        entries=replace(entries, node=entries.node + shift),
        tokens_total=len(kept),
    )


PIECE_OVERHEAD = 64
"""What a forward pass costs at least beside its nodes, in nodes; see ``split``."""


def split(tree: TokenTree, max_nodes: int) -> list[TokenTree]:
    """Cut a tree into pieces of at most ``max_nodes`` nodes, repeated ancestors included.

    Cuts fall between a leaf and the next branch, and are chosen (dynamic programming over the
    branches) so that the sum over pieces of overhead + nodes + nodes^2 / (8 max_nodes) is least: little
    is computed twice, no piece is a sliver, and the quadratic term, which stands for the dense mask,
    keeps sizes even. The overhead is an eighth of the budget where that is large: on a GPU a pass costs
    the time of thousands of nodes before it has computed any.

    A single path longer than the budget becomes a piece of its own.
    """
    if len(tree) <= max_nodes:
        return [tree] if len(tree) else []
    starts = tree.branch_starts
    ends = np.append(starts[1:], len(tree))
    # A piece of branches i..j has ends[j] - offset[i] nodes; offset grows strictly with i.
    offset = starts - tree.depth[starts]
    overhead = max(PIECE_OVERHEAD, max_nodes // 8)
    best = np.zeros(len(starts) + 1)
    cut = np.zeros(len(starts), dtype=np.int64)
    for j, end in enumerate(ends):
        first = min(int(np.searchsorted(offset, end - max_nodes)), j)
        sizes = end - offset[first : j + 1]
        costs = best[first : j + 1] + overhead + sizes + sizes**2 / (8 * max_nodes)
        choice = int(costs.argmin())
        best[j + 1] = costs[choice]
        cut[j] = first + choice
    pieces: list[TokenTree] = []
    j = len(starts) - 1
    while j >= 0:
        i = int(cut[j])
        pieces.append(_piece(tree, int(starts[i]), int(ends[j])))
        j = i - 1
    return pieces[::-1]


def pieces_of(tree: TokenTree, bounds: Sequence[int]) -> list[TokenTree]:
    """Cut between given branches.

    Args:
        tree: what to cut.
        bounds: ascending numbers of branches; piece ``i`` holds branches ``bounds[i]`` to
            ``bounds[i + 1]``.
    """
    edges = np.append(tree.branch_starts, len(tree))[list(bounds)]
    return [_piece(tree, int(a), int(b)) for a, b in pairwise(edges)]


def to_rows(tree: TokenTree) -> list[TokenTree]:
    """The tree as root-to-leaf rows: each is a tree without branches, each entry is in one of them."""
    return pieces_of(tree, range(len(tree.branch_starts) + 1))
