"""Visits: the way that a rollout took through its graph, node by node.

Invariant: every step and every traced tool is part of exactly one visit, and visits are numbered in the order
in which they began.

A visit is one execution of a node: a branch (LangGraph's namespace) and an attempt. Steps and spans that
share both are put together; a node that encloses others is a visit only for what it did itself. Visits of one
run of a graph that began in the same superstep ran side by side; the next superstep is where the way led.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from art_core.capture import superseded
from art_core.types import Span, Step, Trajectory

Path = tuple[str, ...]
"""A node's name below those of the nodes that enclose it; empty for what no graph called."""

_STEP_TAG = "graph:step:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One execution of a node.

    Attributes:
        number: its place in the order of beginnings, from 1; 0 for a node that only encloses others.
        path: which node.
        namespace: the branch.
        attempt: 1 for the branch's first execution; retries and resumes count on.
        graph_step: LangGraph's superstep; None where unknown.
        started_at: Unix time, seconds.
        ended_at: Unix time, seconds.
        status: of its span: ``ok``, ``error``, ``interrupted``, ``cancelled``; ``ok`` without one.
        error: the exception of its span.
        superseded: a later attempt replaced what it did.
        steps: LLM calls that it made itself.
        tools: tools and retrievers that it used itself.
        inputs: what the node was given, where that was traced.
        outputs: what it returned.
    """

    number: int = 0
    path: Path
    namespace: str
    attempt: int
    graph_step: int | None = None
    started_at: float
    ended_at: float
    status: str = "ok"
    error: str | None = None
    superseded: bool = False
    steps: tuple[Step, ...] = ()
    tools: tuple[Span, ...] = ()
    inputs: object = None
    outputs: object = None

    @property
    def scope(self) -> str:
        """The namespace of the run of a graph that it is part of; empty for the outermost."""
        return self.namespace.rpartition("|")[0]

    @property
    def branch(self) -> str:
        """What tells it from other runs of the node side by side, short."""
        return self.namespace.rpartition("|")[2].partition(":")[2][:8]

    def made(self) -> list[Step | Span]:
        """Calls and tools in the order in which they began."""
        return sorted((*self.steps, *self.tools), key=lambda made: made.started_at)


def visits_of(trajectory: Trajectory) -> list[Visit]:
    """A rollout's visits in the order in which they began, enclosing ones before what they enclose."""
    building: dict[tuple[str, int], _Building] = {}
    for span in trajectory.spans:
        if _is_node(span):
            _at(building, span.namespace, span.node, span.attempt).own = span
        elif span.kind in ("tool", "retriever"):
            _at(building, span.namespace, span.node, span.attempt).tools.append(span)
    for n, step in enumerate(trajectory.steps):
        where = step.identity
        # Without a graph there is nothing to put calls together by: each is a visit of its own.
        alone = n if not where.namespace and where.node is None else where.attempt
        _at(building, where.namespace, where.node, alone).steps.append(step)
    replaced = superseded(trajectory.steps)
    found = sorted((b.visit(replaced) for b in building.values()), key=lambda v: (v.started_at, len(v.path)))
    enclosing = {space for visit in found for space in _around(visit.namespace)}
    visits: list[Visit] = []
    number = 0
    for visit in found:
        own = visit.steps or visit.tools or visit.namespace not in enclosing
        number += bool(own)
        visits.append(replace(visit, number=number) if own else visit)
    return visits


def stages(visits: Sequence[Visit]) -> dict[str, list[list[Visit]]]:
    """By run of a graph (its scope): the visits of each superstep, in order."""
    scopes: dict[str, list[Visit]] = defaultdict(list)
    for visit in visits:
        if visit.path:
            scopes[visit.scope].append(visit)
    found: dict[str, list[list[Visit]]] = {}
    for scope, members in scopes.items():
        ordered: list[list[Visit]] = []
        for visit in sorted(
            members, key=lambda v: (-1 if v.graph_step is None else v.graph_step, v.started_at)
        ):
            if ordered and _side_by_side(ordered[-1], visit):
                ordered[-1].append(visit)
            else:
                ordered.append([visit])
        found[scope] = ordered
    return found


def _side_by_side(stage: Sequence[Visit], visit: Visit) -> bool:
    if visit.namespace in {other.namespace for other in stage}:
        return True  # another attempt
    if visit.graph_step is None or stage[0].graph_step is None:
        return visit.started_at < min(other.ended_at for other in stage)
    return visit.graph_step == stage[0].graph_step


def path_of(namespace: str, node: str | None) -> Path:
    """Node names from the outermost: ``work:<uuid>|1|inner:<uuid>`` is ``("work", "inner")``."""
    if not namespace:
        return () if node is None else (node,)
    parts = [part.partition(":") for part in namespace.split("|")]
    names = tuple(name for name, colon, _ in parts if colon)
    return names or (parts[-1][0],)


@dataclass(slots=True)
class _Building:
    namespace: str
    path: Path
    attempt: int
    own: Span | None = None
    steps: list[Step] = field(default_factory=list[Step])
    tools: list[Span] = field(default_factory=list[Span])

    def visit(self, replaced: frozenset[str]) -> Visit:
        parts = [self.own] if self.own else [*self.steps, *self.tools]
        times = [(made.started_at, made.started_at + made.duration) for made in parts]
        return Visit(
            path=self.path,
            namespace=self.namespace,
            attempt=max(1, self.attempt),
            graph_step=self._graph_step(),
            started_at=min(start for start, _ in times),
            ended_at=max(end for _, end in times),
            status=self.own.status if self.own else "ok",
            error=self.own.error if self.own else None,
            superseded=bool(self.steps) and all(step.id in replaced for step in self.steps),
            steps=tuple(self.steps),
            tools=tuple(self.tools),
            inputs=self.own.inputs if self.own else None,
            outputs=self.own.outputs if self.own else None,
        )

    def _graph_step(self) -> int | None:
        for step in self.steps:
            if step.identity.graph_step is not None:
                return step.identity.graph_step
        for tag in self.own.tags if self.own else ():
            number = tag.removeprefix(_STEP_TAG)
            if number != tag and number.isdecimal():
                return int(number)
        return None


def _at(
    building: dict[tuple[str, int], _Building], namespace: str, node: str | None, attempt: int
) -> _Building:
    key = namespace or f"\0{node or ''}", attempt
    if key not in building:
        building[key] = _Building(namespace, path_of(namespace, node), attempt)
    return building[key]


def _is_node(span: Span) -> bool:
    return span.kind == "chain" and bool(span.namespace) and span.name == span.node


def _around(namespace: str) -> Iterator[str]:
    """The namespaces of the nodes that enclose a branch, without its own."""
    parts = namespace.split("|")
    for depth in range(1, len(parts)):
        yield "|".join(parts[:depth])
