"""The token tree of a group, as forks and the stretches between them.

Invariant: every token of every step with tokens is in the trie at its depth, what begins alike is there once,
and a stretch ends exactly where rows part or one of them ends.

It is the tree that training computes (`art_core.training.token_tree`), without what only training needs:
that one has a node for each token and is made of arrays, this one is for looking at, and needs no numpy.
A step that the next one continues is a part of the same row, so a rollout is one row, and one more for each
place where its history was changed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from art_core.types import Trajectory

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence of tokens that no other of its rollout continues.

    Attributes:
        ids: all of them  [tokens].
        rollout: number of its rollout in the group.
        sampled: begin and end of what the policy sampled, ascending.
        steps: how many steps it holds.
    """

    ids: Ids
    rollout: int
    sampled: tuple[tuple[int, int], ...]
    steps: int


@dataclass(slots=True)
class Stretch:
    """Tokens between two forks.

    Attributes:
        number: its place in depth-first order.
        start: depth of its first token: how many come before it.
        ids: its tokens  [tokens].
        rows: numbers of the rows that pass through it.
        rollouts: numbers of the rollouts that do.
        sampled: begin and end, by depth, of what the policy sampled in it, ascending.
        parent: the stretch before it.
        children: those after it; empty at a leaf.
    """

    number: int
    start: int
    ids: Ids
    rows: range
    rollouts: frozenset[int]
    sampled: tuple[tuple[int, int], ...]
    parent: "Stretch | None" = None
    children: list["Stretch"] = field(default_factory=list["Stretch"])

    @property
    def end(self) -> int:
        """Depth of what comes next."""
        return self.start + len(self.ids)

    @property
    def sampled_tokens(self) -> int:
        """How many of its tokens the policy sampled."""
        return sum(end - start for start, end in self.sampled)

    def walk(self) -> Iterator["Stretch"]:
        """This one and all after it, parents before children."""
        waiting: list[Stretch] = [self]
        while waiting:
            stretch = waiting.pop()
            yield stretch
            waiting.extend(reversed(stretch.children))


@dataclass(frozen=True, slots=True)
class TokenTrie:
    """A group's token tree.

    Attributes:
        roots: one, unless prompts differ from their first token on.
        rows: in the order of their tokens.
        tokens_total: tokens of the steps' prompts and answers, shared ones counted each time.
        without_tokens: steps that have none.
    """

    roots: tuple[Stretch, ...]
    rows: tuple[Row, ...]
    tokens_total: int
    without_tokens: int

    def walk(self) -> Iterator[Stretch]:
        """All stretches, depth first."""
        for root in self.roots:
            yield from root.walk()

    @property
    def tokens(self) -> int:
        """Tokens when each is counted once."""
        return sum(len(stretch.ids) for stretch in self.walk())

    @property
    def forks(self) -> list[Stretch]:
        """Stretches after which rollouts part, depth first."""
        return [stretch for stretch in self.walk() if len(stretch.children) > 1]

    @property
    def common(self) -> int:
        """Tokens that all rows begin with."""
        return len(self.roots[0].ids) if len(self.roots) == 1 else 0


def trie_of(trajectories: Sequence[Trajectory]) -> TokenTrie:
    """The tree of some rollouts' tokens."""
    rows: list[Row] = []
    total = without = 0
    for number, trajectory in enumerate(trajectories):
        own = []
        for step in trajectory.steps:
            if step.tokens is None:
                without += 1
                continue
            ids = step.tokens.prompt + step.tokens.completion
            total += len(ids)
            own.append((ids, len(step.tokens.prompt)))
        rows += _rows(number, own)
    rows.sort(key=lambda row: (row.ids, row.rollout))
    roots = _grow(rows, 0, range(len(rows)))
    for number, stretch in enumerate(s for root in roots for s in root.walk()):
        stretch.number = number
    return TokenTrie(tuple(roots), tuple(rows), total, without)


def _rows(rollout: int, steps: Sequence[tuple[Ids, int]]) -> list[Row]:
    """A rollout's steps, put together where one continues another."""
    open_: list[tuple[Ids, list[tuple[int, int]], int]] = []
    for ids, prompt in sorted(steps, key=lambda step: len(step[0])):
        for i, (before, sampled, count) in enumerate(open_):
            if ids[: len(before)] == before:
                # Merged into the first row that it continues; another one may be continued, too.
                open_[i] = (ids, [*sampled, (prompt, len(ids))], count + 1)
                break
        else:
            open_.append((ids, [(prompt, len(ids))], 1))
    return [Row(ids, rollout, _joined(sampled), count) for ids, sampled, count in open_]


def _grow(rows: Sequence[Row], depth: int, among: range) -> list[Stretch]:
    """The stretches that begin at a depth, of sorted rows that are alike up to it."""
    roots: list[Stretch] = []
    waiting: list[tuple[int, range, Stretch | None]] = [(depth, among, None)]
    while waiting:
        start, within, parent = waiting.pop()
        for part in _parts(rows, start, within):
            first, last = rows[part[0]].ids, rows[part[-1]].ids
            end = _common(first, last, start)
            stretch = Stretch(
                number=0,
                start=start,
                ids=first[start:end],
                rows=part,
                rollouts=frozenset(rows[i].rollout for i in part),
                sampled=_clipped([span for i in part for span in rows[i].sampled], start, end),
                parent=parent,
            )
            (roots if parent is None else parent.children).append(stretch)
            waiting.append((end, part, stretch))
    return roots


def _parts(rows: Sequence[Row], depth: int, within: range) -> Iterator[range]:
    """Rows that go on beyond a depth, by the token that is there."""
    begin = within.start
    while begin < within.stop and len(rows[begin].ids) <= depth:
        begin += 1  # it ends here; shorter ones come first
    while begin < within.stop:
        token, end = rows[begin].ids[depth], begin + 1
        while end < within.stop and rows[end].ids[depth] == token:
            end += 1
        yield range(begin, end)
        begin = end


def _common(a: Ids, b: Ids, start: int) -> int:
    """Up to where two sequences are equal, from ``start``. Of sorted ones, all those between are, too."""
    low, high = start, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _joined(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return tuple(found)


def _clipped(spans: Sequence[tuple[int, int]], start: int, end: int) -> tuple[tuple[int, int], ...]:
    return _joined([(max(a, start), min(b, end)) for a, b in spans if a < end and b > start])
