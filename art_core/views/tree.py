"""A trajectory as a tree: which node, in which subgraph, on which attempt, made which calls.

Invariant: every step is in the tree exactly once, and children are in the order in which they started.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.text import Text
from rich.tree import Tree

from art_core.types import Step, Trajectory
from art_core.views.facts import step_facts
from art_core.views.text import rendered, safe, shorten, tool_calls


@dataclass(slots=True)
class TreeNode:
    """One execution of a graph node, or the rollout itself.

    Attributes:
        name: node name; the scenario's id for the root.
        namespace: the branch; empty for the root.
        attempt: which execution of the branch; retries and resumes count on.
        steps: calls made by this node itself.
        children: nodes of the subgraphs that it ran.
    """

    name: str
    namespace: str = ""
    attempt: int = 1
    steps: list[Step] = field(default_factory=list[Step])
    children: list["TreeNode"] = field(default_factory=list["TreeNode"])

    def walk(self) -> Iterator["TreeNode"]:
        """This node and all below, parents before children."""
        yield self
        for child in self.children:
            yield from child.walk()

    def __rich__(self) -> Tree:
        shown = Tree(self._label())
        self._grow(shown)
        return shown

    def __str__(self) -> str:
        return rendered(self)

    def _label(self) -> Text:
        label = Text(safe(self.name), style="bold")
        if self.attempt > 1:
            label.append(f"  attempt {self.attempt}", style="yellow")
        return label

    def _grow(self, shown: Tree) -> None:
        for step in self.steps:
            line = Text("  ".join(step_facts(step)))
            line.append(f"  {safe(_gist(step))}", style="red" if step.error else "green")
            shown.add(line)
        for child in self.children:
            child._grow(shown.add(child._label()))

    @property
    def total_steps(self) -> int:
        """Calls made here and below."""
        return sum(len(node.steps) for node in self.walk())


def call_tree(trajectory: Trajectory) -> TreeNode:
    """The tree of a trajectory's calls.

    LangGraph's namespace of a call (``supervisor:<uuid>|writer:<uuid>``) is its path from the root.
    """
    root = TreeNode(trajectory.scenario.id)
    found: dict[tuple[str, int], TreeNode] = {}
    for step in trajectory.steps:
        identity = step.identity
        segments = identity.namespace.split("|") if identity.namespace else []
        parent = root
        for depth in range(1, len(segments) + 1):
            namespace = "|".join(segments[:depth])
            # Of the enclosing nodes' attempts nothing is known; only the last segment's is the step's.
            attempt = identity.attempt if depth == len(segments) else 1
            node = found.get((namespace, attempt))
            if node is None:
                name = segments[depth - 1].partition(":")[0]
                node = found[namespace, attempt] = TreeNode(name, namespace, attempt)
                parent.children.append(node)
            parent = node
        if not segments and identity.node is not None:
            node = found.get((identity.node, identity.attempt))
            if node is None:
                node = TreeNode(identity.node, "", identity.attempt)
                found[identity.node, identity.attempt] = node
                root.children.append(node)
            parent = node
        parent.steps.append(step)
    return root


def _gist(step: Step) -> str:
    calls = ", ".join(name for name, _ in tool_calls(step.response or {}))
    words = step.error or step.message() or (f"-> {calls}" if calls else "")
    return shorten(" ".join(words.split()), 60)
