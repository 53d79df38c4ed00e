"""The token tree of a group, as forks and the stretches between them.

Invariant: every token of every step with tokens is in the trie at its depth, what begins alike is there once,
and a stretch ends exactly where rows part or one of them ends.

It is the tree that training computes (`art_core.training.token_tree`), without what only training needs:
that one has a node for each token and is made of arrays, this one is for looking at, and needs no numpy.
A step that the next one continues is a part of the same row, so a rollout is one row, and one more for each
place where its history was changed.

Ids stay the bytes that the store keeps (little-endian int32), which are compared and cut much faster than
numbers; all places and lengths are in tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from art_core.store.packing import ids_from_bytes
from art_core.store.parts import TokenBytes

_WIDTH = 4  # bytes of a token


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence of tokens that no other of its rollout continues.

    Attributes:
        ids: all of them.
        rollout: number of its rollout in the group.
        sampled: begin and end of what the policy sampled, ascending.
        steps: how many steps it holds.
    """

    ids: bytes
    rollout: int
    sampled: tuple[tuple[int, int], ...]
    steps: int

    def __len__(self) -> int:
        return len(self.ids) // _WIDTH


@dataclass(slots=True)
class Stretch:
    """Tokens between two forks.

    Attributes:
        number: its place in depth-first order.
        start: depth of its first token: how many come before it.
        ids: its tokens.
        rows: numbers of the rows that pass through it.
        rollouts: numbers of the rollouts that do.
        sampled: begin and end, by depth, of what the policy sampled in it, ascending.
        parent: the stretch before it.
        children: those after it; empty at a leaf.
    """

    number: int
    start: int
    ids: bytes
    rows: range
    rollouts: frozenset[int]
    sampled: tuple[tuple[int, int], ...]
    parent: "Stretch | None" = None
    children: list["Stretch"] = field(default_factory=list["Stretch"])

    def __len__(self) -> int:
        return len(self.ids) // _WIDTH

    @property
    def tokens(self) -> tuple[int, ...]:
        """Its token ids."""
        return ids_from_bytes(self.ids)

    @property
    def end(self) -> int:
        """Depth of what comes next."""
        return self.start + len(self)

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
        return sum(map(len, self.walk()))

    @property
    def forks(self) -> list[Stretch]:
        """Stretches after which rollouts part, depth first."""
        return [stretch for stretch in self.walk() if len(stretch.children) > 1]

    @property
    def common(self) -> int:
        """Tokens that all rows begin with."""
        return len(self.roots[0]) if len(self.roots) == 1 else 0


def trie_of(rollouts: Sequence[Sequence[TokenBytes | None]]) -> TokenTrie:
    """The tree of some rollouts' tokens.

    Args:
        rollouts: the tokens of each one's steps; None for steps without any.
    """
    rows: list[Row] = []
    total = without = 0
    for number, steps in enumerate(rollouts):
        own: list[tuple[bytes, int]] = []
        for step in steps:
            if step is None:
                without += 1
                continue
            prompt, completion = step
            own.append((prompt + completion, len(prompt) // _WIDTH))
            total += (len(prompt) + len(completion)) // _WIDTH
        rows += _rows(number, own)
    rows.sort(key=lambda row: (row.ids, row.rollout))
    roots = _grow(rows)
    for number, stretch in enumerate(s for root in roots for s in root.walk()):
        stretch.number = number
    return TokenTrie(tuple(roots), tuple(rows), total, without)


def _rows(rollout: int, steps: Sequence[tuple[bytes, int]]) -> list[Row]:
    """A rollout's steps, put together where one continues another."""
    open_: list[tuple[bytes, list[tuple[int, int]], int]] = []
    for ids, prompt in sorted(steps, key=lambda step: len(step[0])):
        span = prompt, len(ids) // _WIDTH
        for i, (before, sampled, count) in enumerate(open_):
            if ids.startswith(before):
                # Merged into the first row that it continues; another one may be continued, too.
                open_[i] = (ids, [*sampled, span], count + 1)
                break
        else:
            open_.append((ids, [span], 1))
    return [Row(ids, rollout, _joined(sampled), count) for ids, sampled, count in open_]


def _grow(rows: Sequence[Row]) -> list[Stretch]:
    """The stretches of sorted rows; those of depth 0."""
    roots: list[Stretch] = []
    waiting: list[tuple[int, range, Stretch | None]] = [(0, range(len(rows)), None)]
    while waiting:
        start, within, parent = waiting.pop()
        for part in _parts(rows, start, within):
            first, last = rows[part[0]].ids, rows[part[-1]].ids
            end = _common(first, last, start)
            stretch = Stretch(
                number=0,
                start=start,
                ids=first[start * _WIDTH : end * _WIDTH],
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
    at = slice(depth * _WIDTH, (depth + 1) * _WIDTH)
    while begin < within.stop and len(rows[begin]) <= depth:
        begin += 1  # it ends here; shorter ones come first
    while begin < within.stop:
        token, end = rows[begin].ids[at], begin + 1
        while end < within.stop and rows[end].ids[at] == token:
            end += 1
        yield range(begin, end)
        begin = end


def _common(a: bytes, b: bytes, start: int) -> int:
    """Up to where two sequences are equal, from ``start``. Of sorted ones, all those between are, too."""
    low, high = start, min(len(a), len(b)) // _WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * _WIDTH : middle * _WIDTH] == b[low * _WIDTH : middle * _WIDTH]:
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
