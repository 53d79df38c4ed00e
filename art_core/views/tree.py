"""A trajectory as a tree: which node, in which subgraph, on which attempt, made which calls.

Invariant: every step is in the tree exactly once, and children are in the order in which they started.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.text import Text
from rich.tree import Tree

from art_core.types import Span, Step, Trajectory
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
        tools: tools and retrievers that it used, where spans were recorded.
        children: nodes of the subgraphs that it ran.
    """

    name: str
    namespace: str = ""
    attempt: int = 1
    steps: list[Step] = field(default_factory=list[Step])
    tools: list[Span] = field(default_factory=list[Span])
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
        lines = [(step.started_at, _step_line(step)) for step in self.steps]
        lines += [(tool.started_at, _tool_line(tool)) for tool in self.tools]
        for _, line in sorted(lines, key=lambda dated: dated[0]):
            shown.add(line)
        for child in self.children:
            child._grow(shown.add(child._label()))

    @property
    def total_steps(self) -> int:
        """Calls made here and below."""
        return sum(len(node.steps) for node in self.walk())


def call_tree(trajectory: Trajectory) -> TreeNode:
    """The tree of a trajectory's calls, and of its tools where spans were recorded.

    LangGraph's namespace of a call (``supervisor:<uuid>|writer:<uuid>``) is its path from the root.
    """
    root = TreeNode(trajectory.scenario.id)
    found: dict[tuple[str, int], TreeNode] = {}
    tools = [span for span in trajectory.spans if span.kind in ("tool", "retriever")]
    for made in sorted((*trajectory.steps, *tools), key=lambda m: m.started_at):
        if isinstance(made, Step):
            place = made.identity
            _place(root, found, place.namespace, place.node, place.attempt).steps.append(made)
        else:
            _place(root, found, made.namespace, made.node, made.attempt).tools.append(made)
    return root


def _place(
    root: TreeNode, found: dict[tuple[str, int], TreeNode], namespace: str, name: str | None, attempt: int
) -> TreeNode:
    """The node of a branch and attempt; it and those around it are made where they are missing."""
    if not namespace and name is None:
        return root
    path = namespace.split("|") if namespace else [name or ""]
    parent = root
    for depth, segment in enumerate(path, 1):
        # Of the enclosing nodes' attempts nothing is known.
        key = "|".join(path[:depth]), attempt if depth == len(path) else 1
        node = found.get(key)
        if node is None:
            node = found[key] = TreeNode(segment.partition(":")[0], key[0] if namespace else "", key[1])
            parent.children.append(node)
        parent = node
    return parent


def _step_line(step: Step) -> Text:
    line = Text("  ".join(step_facts(step)))
    return line.append(f"  {safe(_gist(step))}", style="red" if step.error else "green")


def _tool_line(tool: Span) -> Text:
    line = Text(f"{tool.kind} {safe(tool.name)}  {tool.duration:.2f} s", style="magenta")
    outcome = tool.error or ("" if tool.outputs is None else str(tool.outputs))
    return line.append(f"  {safe(shorten(' '.join(outcome.split()), 60))}", style="red" if tool.error else "")


def _gist(step: Step) -> str:
    calls = ", ".join(name for name, _ in tool_calls(step.response or {}))
    words = step.error or step.message() or (f"-> {calls}" if calls else "")
    return shorten(" ".join(words.split()), 60)
