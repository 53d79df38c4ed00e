"""What the engine has computed: a tree of tokens, each with the pool slot that holds its keys and values.

Invariant: a ready node's slot holds the keys, values and last hidden state of its token after exactly
the tokens on the path from its root; a node whose pins are not zero is never evicted.

Roots separate what must never be shared: policy versions, and in deterministic mode prompts. Two
requests that agree on their first tokens walk the same nodes, so a shared prefix, a longer history or
an identical prompt costs nothing twice.
"""

import heapq
from collections.abc import Hashable, Iterator, Sequence


class Node:
    """One token after the tokens above it.

    Attributes:
        token: its id; -1 for a root.
        slot: where its keys, values and hidden state lie; -1 for a root.
        depth: tokens on the path from the root, itself included; its position is ``depth - 1``.
        pins: sequences that stand on this node now.
        used: the tree's clock when a sequence last stood here.
        ready: whether its slot is filled.
    """

    __slots__ = ("children", "depth", "parent", "pins", "ready", "slot", "token", "used")

    def __init__(self, token: int, slot: int, parent: "Node | None") -> None:
        self.token = token
        self.slot = slot
        self.parent = parent
        self.depth = 0 if parent is None else parent.depth + 1
        self.children: dict[int, Node] = {}
        self.pins = 0
        self.used = 0
        self.ready = parent is None


class TokenTree:
    """The nodes of all versions, and which slots are free.

    Used by one thread only, the scheduler's.

    Args:
        budget: nodes to keep when nothing runs.
        limit: nodes that there may ever be, those of running sequences included; the budget where None.
        whole_roots: evict a root with everything below it, not single nodes. Deterministic mode needs
            it: what remained of a half-evicted prompt would be completed in other pieces than at first.
    """

    def __init__(self, budget: int, *, limit: int | None = None, whole_roots: bool = False) -> None:
        self.budget = budget
        self.limit = budget if limit is None else limit
        self.whole_roots = whole_roots
        self.slots = 0
        self.nodes = 0
        self._free: list[int] = []
        self._roots: dict[str, dict[Hashable, Node]] = {}
        self._clock = 0

    def root(self, version: str, key: Hashable = None) -> Node:
        """The root for a version (and key); made when it is not there."""
        roots = self._roots.setdefault(version, {})
        if key not in roots:
            roots[key] = Node(-1, -1, None)
        return roots[key]

    def add(self, parent: Node, token: int) -> Node:
        """A new node, not ready, with a slot of its own."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = self.slots
            self.slots += 1
        self.nodes += 1
        node = Node(token, slot, parent)
        parent.children[token] = node
        return node

    def discard(self, nodes: Sequence[Node]) -> None:
        """Take back nodes that were added and never became ready; children after parents."""
        for node in reversed(nodes):
            self._remove(node)

    def move(self, source: Node | None, target: Node | None) -> None:
        """Move a sequence's pin; None: it starts or ends."""
        self._clock += 1
        if target is not None:
            target.pins += 1
            target.used = self._clock
        if source is not None:
            source.pins -= 1
            source.used = self._clock

    def forget(self, version: str) -> None:
        """Free everything of a version; no sequence of it runs any more."""
        for root in self._roots.pop(version, {}).values():
            self._free_below(root)

    def trim(self, room: int = 0) -> bool:
        """Evict what was used longest ago until ``room`` more nodes fit into the budget.

        Evicts a tenth more than asked, so that the search for leaves is rare.

        Returns:
            Whether they fit into the limit now; if not, running sequences hold too much.
        """
        if self.nodes + room <= self.budget:
            return True
        target = max(0, self.budget - room - self.budget // 10)
        if self.whole_roots:
            self._evict_roots(target)
        else:
            self._evict_leaves(target)
        return self.nodes + room <= self.limit

    def _evict_leaves(self, target: int) -> None:
        leaves = [
            (node.used, id(node), node)
            for roots in self._roots.values()
            for root in roots.values()
            for node in _below(root)
            if not node.children and not node.pins
        ]
        heapq.heapify(leaves)
        while leaves and self.nodes > target:
            _, _, node = heapq.heappop(leaves)
            parent = node.parent
            self._remove(node)
            if parent is not None and parent.parent is not None and not parent.children and not parent.pins:
                heapq.heappush(leaves, (parent.used, id(parent), parent))

    def _evict_roots(self, target: int) -> None:
        idle: list[tuple[int, str, Hashable]] = []
        for version, roots in self._roots.items():
            for key, root in roots.items():
                below = [root, *_below(root)]
                if not any(node.pins for node in below):
                    idle.append((max(node.used for node in below), version, key))
        for _, version, key in sorted(idle, key=lambda item: item[0]):
            if self.nodes <= target:
                return
            self._free_below(self._roots[version].pop(key))

    def _remove(self, node: Node) -> None:
        if node.parent is not None:
            del node.parent.children[node.token]
        self._free.append(node.slot)
        self.nodes -= 1

    def _free_below(self, root: Node) -> None:
        below = list(_below(root))
        self._free.extend(node.slot for node in below)
        self.nodes -= len(below)


def _below(root: Node) -> Iterator[Node]:
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
