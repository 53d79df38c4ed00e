"""The graph of an agent, drawn, with the way that one rollout took through it.

Invariant: every node that the rollout visited is drawn, whatever is known of the graph; what was not recorded
but must have been passed is drawn as such, never as visited.

The graph's own shape comes from the store, where it was recorded; without it, the shape is what the
rollout shows. Subgraphs are laid out first, each as a graph of its own, and then are boxes of the next one.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from art_core.observe.dashboard.drawing import Edge, Layout, lay_out, path
from art_core.observe.dashboard.visits import Path, Visit, stages
from art_core.types import RolloutStatus, Trajectory
from art_core.views.text import safe, shorten

START, END = "__start__", "__end__"

_LETTER, _DIGIT = 7.6, 6.6  # wide
_WIDEST = 24  # letters
_HEIGHT, _WITH_NUMBERS = 30.0, 46.0
_INSET, _TITLE = 14.0, 26.0
_LABEL_GAP = 5.0  # between a line that leads down and its label


@dataclass(frozen=True, slots=True)
class Shape:
    """A graph as it was compiled.

    Attributes:
        nodes: all of them; `START` and `END` end the paths of a graph's two ends.
        edges: from, to, and whether a condition decides.
    """

    nodes: tuple[Path, ...]
    edges: tuple[tuple[Path, Path, bool], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnNode:
    """A box.

    Attributes:
        label: what it is called, short.
        name: its whole path, for a tooltip.
        kind: ``end`` (a graph's start or end), ``node``, or ``subgraph``, which encloses others.
        state: ``visited``, ``passed`` (not recorded, but there is no other way), ``unvisited``, ``failed``,
            ``interrupted`` or ``retried``.
        numbers: of its visits.
    """

    label: str
    name: str
    kind: str
    state: str
    x: float
    y: float
    width: float
    height: float
    numbers: tuple[int, ...] = ()

    @property
    def shown_numbers(self) -> str:
        """As many of the numbers as there is room for."""
        room = int((self.width - 20) / _DIGIT)
        shown = " ".join(map(str, self.numbers))
        return shown if len(shown) <= room else f"{shown[: room - 1].rpartition(' ')[0]} …"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnEdge:
    """A line.

    Attributes:
        d: its SVG path.
        walked: places in the order of walked edges of its own graph, ascending; empty when it was not walked.
        conditional: a condition decides whether it is.
        back: it leads back up.
        known: it is part of the recorded shape; False where a rollout alone shows it.
        x: where a label goes.
        y: where a label goes.
        title: for a tooltip.
    """

    d: str
    walked: tuple[int, ...]
    conditional: bool
    back: bool
    known: bool
    x: float
    y: float
    title: str

    @property
    def label(self) -> str:
        """How often it was walked, where that was more than once: in which order, the nodes' numbers say."""
        return f"\u00d7{len(self.walked)}" if len(self.walked) > 1 else ""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A drawn graph; sizes in pixels.

    Attributes:
        left: where it begins, 0 or less: the label of a line may stick out.
        width: of all of it, from there.
        described: the same in words, for who cannot see it.
    """

    left: float
    width: float
    height: float
    nodes: tuple[DrawnNode, ...]
    edges: tuple[DrawnEdge, ...]
    described: str


def shape_from(data: Mapping[str, Any]) -> Shape | None:
    """A shape as the store keeps it (see `art_core.sinks.GraphSink`); None when it is none."""
    try:
        nodes = tuple(tuple(str(node).split(":")) for node in data["nodes"])
        edges = tuple(
            (tuple(str(a).split(":")), tuple(str(b).split(":")), bool(c)) for a, b, c in data["edges"]
        )
    except (KeyError, TypeError, ValueError):
        return None
    return Shape(nodes, edges)


def fitting_shape(recorded: Iterable[Mapping[str, Any]], visits: Sequence[Visit]) -> Shape | None:
    """The latest recorded shape that has every outermost node that was visited."""
    outermost = {visit.path[0] for visit in visits if visit.path}
    fitting = None
    for data in recorded:
        shape = shape_from(data)
        if shape is not None and outermost and outermost <= {node[0] for node in shape.nodes}:
            fitting = shape
    return fitting


def draw(trajectory: Trajectory, visits: Sequence[Visit], shape: Shape | None) -> Drawing | None:
    """A rollout's graph; None when no graph called.

    Args:
        trajectory: the rollout.
        visits: its visits.
        shape: the graph's own, where it is known.
    """
    if not any(visit.path for visit in visits):
        return None
    web = _Web(shape)
    for visit in visits:
        if visit.path:
            web.add(visit.path)
    ended = trajectory.status is RolloutStatus.FINISHED
    for scope, staged in sorted(stages(visits).items(), key=lambda item: item[1][0][0].started_at):
        inside = staged[0][0].path[:-1]
        web.walk(inside, staged, to_end=bool(scope) or ended)
    return _Painter(web, visits).drawing()


# -- the graph and the way through it ----------------------------------------------------------------


@dataclass(slots=True)
class _Line:
    known: bool
    conditional: bool = False
    walked: list[int] = field(default_factory=list[int])


class _Web:
    """Nodes by what encloses them, edges between nodes of one enclosure, and which were walked."""

    def __init__(self, shape: Shape | None) -> None:
        self.inside: dict[Path, list[str]] = defaultdict(list)
        self.lines: dict[Path, dict[Edge, _Line]] = defaultdict(dict)
        self.passed: set[Path] = set()
        self._walked = 0
        for node in () if shape is None else shape.nodes:
            self.add(node)
        for source, target, conditional in () if shape is None else shape.edges:
            # An edge across enclosures is one between the two boxes of the innermost that holds both.
            depth = 0
            while depth < min(len(source), len(target)) - 1 and source[depth] == target[depth]:
                depth += 1
            ends = source[depth], target[depth]
            self.lines[source[:depth]].setdefault(ends, _Line(known=True)).conditional |= conditional

    def add(self, node: Path) -> None:
        """A node, and those that enclose it."""
        for depth in range(len(node)):
            inside = self.inside[node[:depth]]
            if not inside:
                inside.append(START)
            if node[depth] not in inside:
                inside.append(node[depth])

    def walk(self, inside: Path, staged: Sequence[Sequence[Visit]], *, to_end: bool) -> None:
        """Mark the way through one run of a graph."""
        stops: list[list[str]] = [
            [START],
            *(list(dict.fromkeys(v.path[-1] for v in stage)) for stage in staged),
        ]
        if to_end:
            stops.append([END])
            if END not in self.inside[inside]:
                self.inside[inside].append(END)
        for sources, targets in pairwise(stops):
            for target in targets:
                ways = [way for s in sources if (way := self._way(inside, s, target))]
                if ways:
                    shortest = min(map(len, ways))
                    for way in ways:
                        if len(way) == shortest:
                            self._mark(inside, way)
                else:  # a `Send` or a `Command`, or no shape is known
                    for source in sources:
                        self._mark(inside, [source, target])

    def _way(self, inside: Path, source: str, target: str) -> list[str] | None:
        """The shortest way along known edges; it may lead through nodes that left no record."""
        known = self.lines[inside]
        after: dict[str, list[str]] = defaultdict(list)
        for (a, b), line in known.items():
            if line.known:
                after[a].append(b)
        waiting = deque([[source]])
        seen: set[str] = set()
        while waiting:
            way = waiting.popleft()
            for node in after[way[-1]]:
                if node == target:
                    return [*way, node]
                if node not in seen:
                    seen.add(node)
                    waiting.append([*way, node])
        return None

    def _mark(self, inside: Path, way: Sequence[str]) -> None:
        for source, target in pairwise(way):
            self._walked += 1
            line = self.lines[inside].setdefault((source, target), _Line(known=False))
            line.walked.append(self._walked)
        self.passed.update((*inside, node) for node in way[1:-1])


# -- boxes and lines ---------------------------------------------------------------------------------


class _Painter:
    """Boxes and lines of a web, from the inside out."""

    def __init__(self, web: _Web, visits: Sequence[Visit]) -> None:
        self._web = web
        self._visits: dict[Path, list[Visit]] = defaultdict(list)
        for visit in visits:
            self._visits[visit.path].append(visit)
        self._nodes: list[DrawnNode] = []
        self._edges: list[DrawnEdge] = []
        self._layouts: dict[Path, Layout] = {}

    def drawing(self) -> Drawing:
        width, height = self._paint((), 4.0, 4.0)
        # A line that leads back may run at the very edge, and its label beyond it.
        width = max([width, *(edge.x + len(edge.label) * _DIGIT for edge in self._edges if edge.back)])
        down = (edge.x - _LABEL_GAP - len(edge.label) * _DIGIT for edge in self._edges if not edge.back)
        left = min([0.0, *down])
        return Drawing(
            left, width + 8 - left, height + 8, tuple(self._nodes), tuple(self._edges), self._described()
        )

    def _size(self, node: Path) -> tuple[float, float]:
        if node[-1] in (START, END):
            return 54.0, 22.0
        if self._web.inside.get(node):
            width, height = self._measure(node)
            return max(width + 2 * _INSET, self._label_width(node)), height + _TITLE + _INSET
        numbers = self._numbers(node)
        room = min(len(" ".join(map(str, numbers))), _WIDEST) * _DIGIT + 20
        return max(self._label_width(node), room), _WITH_NUMBERS if numbers else _HEIGHT

    @staticmethod
    def _label_width(node: Path) -> float:
        return max(60.0, min(len(node[-1]), _WIDEST) * _LETTER + 22)

    def _measure(self, inside: Path) -> tuple[float, float]:
        layout = self._layout(inside)
        return layout.width, layout.height

    def _layout(self, inside: Path) -> Layout:
        if inside not in self._layouts:
            self._layouts[inside] = self._lay_out(inside)
        return self._layouts[inside]

    def _lay_out(self, inside: Path) -> Layout:
        sizes = {name: self._size((*inside, name)) for name in self._web.inside[inside]}
        edges = [edge for edge in self._web.lines[inside] if edge[0] in sizes and edge[1] in sizes]
        return lay_out(sizes, edges)

    def _paint(self, inside: Path, left: float, top: float) -> tuple[float, float]:
        layout = self._layout(inside)
        for name, (x, y, wide, high) in layout.boxes.items():
            node = (*inside, name)
            self._nodes.append(self._node(node, left + x, top + y, wide, high))
            if self._web.inside.get(node):
                inner = self._measure(node)[0]
                self._paint(node, left + x + (wide - inner) / 2, top + y + _TITLE)
        for edge, points in layout.lines.items():
            line = self._web.lines[inside][edge]
            moved = [(left + x, top + y) for x, y in points]
            middle = len(moved) // 2
            (x0, y0), (x1, y1) = moved[middle - 1], moved[middle]
            self._edges.append(
                DrawnEdge(
                    d=path(moved, angular=edge in layout.back),
                    walked=tuple(line.walked),
                    conditional=line.conditional,
                    back=edge in layout.back,
                    known=line.known,
                    x=(x0 + x1) / 2,
                    y=(y0 + y1) / 2,
                    title=f"{_name(edge[0])} to {_name(edge[1])}: " + _times(len(line.walked)),
                )
            )
        return layout.width, layout.height

    def _node(self, node: Path, x: float, y: float, wide: float, high: float) -> DrawnNode:
        label = _name(node[-1])
        kind = "end" if node[-1] in (START, END) else "subgraph" if self._web.inside.get(node) else "node"
        return DrawnNode(
            label=label if len(label) <= _WIDEST else f"{label[: _WIDEST - 1]}…",
            name=" > ".join(map(_name, node)),
            kind=kind,
            state=self._state(node),
            x=x,
            y=y,
            width=wide,
            height=high,
            numbers=self._numbers(node),
        )

    def _numbers(self, node: Path) -> tuple[int, ...]:
        return tuple(visit.number for visit in self._visits.get(node, ()) if visit.number)

    def _state(self, node: Path) -> str:
        inside, name = node[:-1], node[-1]
        if name in (START, END):
            walked = any(line.walked for edge, line in self._web.lines[inside].items() if name in edge)
            return "visited" if walked else "unvisited"
        visits = self._visits.get(node, [])
        if not visits:
            deeper = any(path[: len(node)] == node for path in self._visits)
            return "visited" if deeper else "passed" if node in self._web.passed else "unvisited"
        last = visits[-1]
        if last.status == "error":
            return "failed"
        if last.status == "interrupted":
            return "interrupted"
        return "retried" if any(visit.attempt > 1 for visit in visits) else "visited"

    def _described(self) -> str:
        way = [visit for visits in self._visits.values() for visit in visits if visit.number and visit.path]
        way.sort(key=lambda visit: visit.number)
        said = [f"{visit.number} {' > '.join(map(_name, visit.path))}" for visit in way[:30]]
        more = f", and {len(way) - 30} more" if len(way) > 30 else ""
        return f"The way through the graph: {', '.join(said)}{more}."


def _name(name: str) -> str:
    return {START: "start", END: "end"}.get(name) or shorten(safe(name), 60)


def _times(count: int) -> str:
    return {0: "not taken", 1: "taken once"}.get(count, f"taken {count} times")
