from hypothesis import given
from hypothesis import strategies as st

from art_core.inference.embedded.tree import Node, TokenTree


def grow(tree: TokenTree, tokens: str, version: str = "v", key: object = None) -> Node:
    """Walk along tokens, adding what is missing; everything ready."""
    node = tree.root(version, key)  # type: ignore[arg-type]
    for token in map(ord, tokens):
        node = node.children.get(token) or tree.add(node, token)
        node.ready = True
    return node


def spelled(node: Node) -> str:
    letters = ""
    while node.parent is not None:
        letters, node = chr(node.token) + letters, node.parent
    return letters


def test_sequences_share_the_nodes_of_their_common_prefix() -> None:
    tree = TokenTree(100)
    assert grow(tree, "abc").parent is grow(tree, "abd").parent
    assert tree.nodes == 4


def test_versions_share_nothing() -> None:
    """C41"""
    tree = TokenTree(100)
    assert grow(tree, "abc", "m@1") is not grow(tree, "abc", "m@2")
    assert tree.nodes == 6


def test_what_was_used_longest_ago_is_evicted_first() -> None:
    tree = TokenTree(6)
    for tokens in ("abc", "xyz"):
        node = grow(tree, tokens)
        tree.move(None, node)
        tree.move(node, None)
    tree.trim(room=2)
    older, newer = (tree.root("v").children[ord(first)] for first in "ax")
    assert not older.children
    assert newer.children
    assert tree.nodes == 4


def test_a_pinned_node_and_what_lies_above_it_are_never_evicted() -> None:
    tree = TokenTree(0)
    node = grow(tree, "abc")
    tree.move(None, node)
    grow(tree, "abd")
    tree.trim()
    assert tree.nodes == 3
    assert spelled(node) == "abc"


def test_a_forgotten_version_frees_its_slots_for_others() -> None:
    tree = TokenTree(100)
    grow(tree, "abc", "m@1")
    tree.forget("m@1")
    grow(tree, "xyz", "m@2")
    assert (tree.nodes, tree.slots) == (3, 3)


def test_whole_roots_are_kept_or_evicted_as_one() -> None:
    tree = TokenTree(5, whole_roots=True)
    for prompt in ("abc", "abd"):
        node = grow(tree, prompt, key=prompt)
        tree.move(None, node)
        tree.move(node, None)
    tree.trim()
    assert tree.nodes == 3
    assert grow(tree, "abd", key="abd").depth == tree.nodes == 3


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=20), st.integers(0, 10))
def test_every_node_has_a_slot_of_its_own_after_any_eviction(texts: list[str], budget: int) -> None:
    tree = TokenTree(budget)
    for text in texts:
        grow(tree, text)
        tree.trim()
        assert tree.nodes <= max(budget, 0)
    nodes: list[Node] = []
    stack = list(tree.root("v").children.values())
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack.extend(node.children.values())
    assert len(nodes) == tree.nodes
    assert len({node.slot for node in nodes}) == len(nodes)
