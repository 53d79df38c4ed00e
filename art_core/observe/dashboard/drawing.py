"""Drawing: where the boxes and lines of a directed graph go, top to bottom.

Invariant: no two boxes overlap, the same graph is always drawn in the same way, and an edge that leads back
runs beside the boxes, never through them.

The layered method (Sugiyama, Tagawa, Toda 1981): loops are turned round for the time being, each box is
put one layer below the lowest that leads to it, edges over several layers get a bend in each, the order
within a layer follows the middle of a box's neighbours, and last the boxes of a layer are moved toward
their neighbours as far as those beside them allow.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]
Edge = tuple[str, str]
Box = tuple[float, float, float, float]
"""Left, top, width, height."""

GAP_X = 22.0
GAP_Y = 34.0
"""Between boxes beside and below each other, in pixels."""

LANE = 13.0
"""Between lines that lead back."""

_SWEEPS = 6


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything goes, in pixels from the top left corner.

    Attributes:
        width: of the whole.
        height: of the whole.
        boxes: of each node.
        lines: the points of each edge, from its source to its target.
        back: edges that lead back up, or from a node to itself.
    """

    width: float
    height: float
    boxes: Mapping[str, Box]
    lines: Mapping[Edge, tuple[Point, ...]]
    back: frozenset[Edge]


def lay_out(sizes: Mapping[str, tuple[float, float]], edges: Sequence[Edge]) -> Layout:
    """Place nodes and edges.

    Args:
        sizes: width and height of each node, in the order in which they should come where nothing else
            decides.
        edges: source and target; both are nodes.
    """
    given = list(dict.fromkeys(edges))
    back = _back_edges(list(sizes), given)
    down = [edge for edge in given if edge not in back]
    layer_of = _layers(list(sizes), down)
    layers, chains = _with_bends(layer_of, down)
    links = _links(chains)
    _order(layers, links)
    widths = {name: size[0] for name, size in sizes.items()}
    centres = _centres(layers, links, widths)
    boxes: dict[str, Box] = {}
    spans: list[tuple[float, float]] = []  # top and bottom of each layer
    y = GAP_Y / 2 if back else 0.0
    for layer in layers:
        tall = max((sizes[name][1] for name in layer if name in sizes), default=0.0)
        for name in layer:
            if name in sizes:
                wide, high = sizes[name]
                boxes[name] = (centres[name] - wide / 2, y + (tall - high) / 2, wide, high)
        spans.append((y, y + tall))
        y += tall + GAP_Y
    lines = {edge: _line(chain, boxes, centres, spans[layer_of[edge[0]] :]) for edge, chain in chains.items()}
    right = max(
        [0.0, *(x + wide for x, _, wide, _ in boxes.values()), *(x for p in lines.values() for x, _ in p)]
    )
    lane = right
    for edge in sorted(back, key=lambda e: (layer_of[e[0]] - layer_of[e[1]], given.index(e))):
        if edge[0] == edge[1]:
            lines[edge] = _own_line(boxes[edge[0]])
            lane = max(lane, lines[edge][1][0])
        else:
            lane += LANE
            of = boxes[edge[0]], boxes[edge[1]]
            lines[edge] = _return_line(*of, spans[layer_of[edge[0]]][1], spans[layer_of[edge[1]]][0], lane)
    return Layout(
        lane + (LANE if back else 0.0),
        max(0.0, y - GAP_Y / (2 if back else 1)),
        boxes,
        lines,
        frozenset(back),
    )


def _back_edges(nodes: Sequence[str], edges: Sequence[Edge]) -> set[Edge]:
    """Edges to a node that is being visited, in a depth-first walk: without them no way leads in a circle."""
    after: dict[str, list[str]] = defaultdict(list)
    for source, target in edges:
        after[source].append(target)
    entered = {target for source, target in edges if source != target}
    back: set[Edge] = set()
    done: set[str] = set()
    for start in [*(n for n in nodes if n not in entered), *nodes]:
        if start in done:
            continue
        open_: dict[str, int] = {start: 0}
        while open_:
            node = next(reversed(open_))
            at = open_[node]
            if at == len(after[node]):
                done.add(node)
                del open_[node]
                continue
            open_[node] += 1
            target = after[node][at]
            if target in open_:
                back.add((node, target))
            elif target not in done:
                open_[target] = 0
    return back


def _layers(nodes: Sequence[str], down: Sequence[Edge]) -> dict[str, int]:
    before: dict[str, list[str]] = defaultdict(list)
    after: dict[str, list[str]] = defaultdict(list)
    for source, target in down:
        before[target].append(source)
        after[source].append(target)
    waiting = {node: len(before[node]) for node in nodes}
    ready = [node for node in nodes if not waiting[node]]
    layer = dict.fromkeys(nodes, 0)
    for node in ready:  # grows as it goes
        for target in after[node]:
            layer[target] = max(layer[target], layer[node] + 1)
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    return layer


def _with_bends(
    layer_of: Mapping[str, int], down: Sequence[Edge]
) -> tuple[list[list[str]], dict[Edge, list[str]]]:
    """The layers, bends included, and the way of each edge through them."""
    layers: list[list[str]] = [[] for _ in range(max(layer_of.values(), default=-1) + 1)]
    for node, layer in layer_of.items():
        layers[layer].append(node)
    chains: dict[Edge, list[str]] = {}
    for number, (source, target) in enumerate(down):
        chain = [source]
        for layer in range(layer_of[source] + 1, layer_of[target]):
            bend = f"\0{number}.{layer}"  # no node is called so
            layers[layer].append(bend)
            chain.append(bend)
        chains[source, target] = [*chain, target]
    return layers, chains


def _links(chains: Mapping[Edge, Sequence[str]]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """What is directly above each node or bend, and what is below."""
    above: dict[str, list[str]] = defaultdict(list)
    below: dict[str, list[str]] = defaultdict(list)
    for chain in chains.values():
        for upper, lower in pairwise(chain):
            above[lower].append(upper)
            below[upper].append(lower)
    return above, below


def _order(layers: list[list[str]], links: tuple[dict[str, list[str]], dict[str, list[str]]]) -> None:
    """Put each layer into the order of the middles of its neighbours, downwards and upwards by turns."""
    place = {name: float(i) for layer in layers for i, name in enumerate(layer)}
    for sweep in range(_SWEEPS):
        near = links[sweep % 2]
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            middle = {
                name: sum(place[n] for n in near[name]) / len(near[name]) if near[name] else place[name]
                for name in layer
            }
            layer.sort(key=lambda name: (middle[name], place[name]))
            for i, name in enumerate(layer):
                place[name] = float(i)


def _centres(
    layers: Sequence[Sequence[str]],
    links: tuple[dict[str, list[str]], dict[str, list[str]]],
    widths: Mapping[str, float],
) -> dict[str, float]:
    """The horizontal middle of each node and bend; the leftmost box begins at 0."""

    def half(name: str) -> float:
        return widths.get(name, 4.0) / 2

    centre: dict[str, float] = {}
    for layer in layers:
        x = 0.0
        for name in layer:
            centre[name] = x + half(name)
            x += 2 * half(name) + GAP_X
        for name in layer:  # each layer around the same middle
            centre[name] -= (x - GAP_X) / 2
    for sweep in range(_SWEEPS):
        near = links[sweep % 2]
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wished = {
                n: sum(centre[m] for m in near[n]) / len(near[n]) if near[n] else centre[n] for n in layer
            }
            _spread(layer, wished, half, centre)
    left = min((centre[name] - half(name) for layer in layers for name in layer), default=0.0)
    return {name: x - left for name, x in centre.items()}


def _spread(
    layer: Sequence[str], wished: Mapping[str, float], half: Callable[[str], float], centre: dict[str, float]
) -> None:
    """Move a layer's boxes to where they wish to be, as near as those beside them allow.

    Least squares under "in order and apart" (pool adjacent violators): boxes that would overlap become a
    block, which goes to the middle of what its members wish.
    """
    offset: list[float] = []
    x = 0.0
    for i, name in enumerate(layer):
        x += half(name) if i == 0 else half(layer[i - 1]) + GAP_X + half(name)
        offset.append(x)
    blocks: list[list[float]] = []  # sum of wishes, members
    for i, name in enumerate(layer):
        blocks.append([wished[name] - offset[i], 1.0])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, members = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += members
    i = 0
    for total, members in blocks:
        for _ in range(int(members)):
            centre[layer[i]] = total / members + offset[i]
            i += 1


def _line(
    chain: Sequence[str],
    boxes: Mapping[str, Box],
    centres: Mapping[str, float],
    spans: Sequence[tuple[float, float]],
) -> tuple[Point, ...]:
    """Down from a box, past those of the layers between, to the next one."""
    _, top, _, high = boxes[chain[0]]
    x, target = centres[chain[0]], centres[chain[-1]]
    points = [(x, top + high), (x, spans[0][1])]  # straight out of its layer, where boxes may be higher
    for bend, (above, below) in zip(chain[1:-1], spans[1:], strict=False):
        points += [(centres[bend], above), (centres[bend], below)]
    points += [(target, spans[len(chain) - 1][0]), (target, boxes[chain[-1]][1])]
    return tuple(point for point, before in zip(points, [None, *points], strict=False) if point != before)


def _return_line(source: Box, target: Box, below: float, above: float, lane: float) -> tuple[Point, ...]:
    """Out below the source's layer, up a lane beside all boxes, and in above the target's layer."""
    out_x, in_x = source[0] + source[2] * 0.8, target[0] + target[2] * 0.8
    under, over = below + GAP_Y / 3, above - GAP_Y / 3
    return (
        (out_x, source[1] + source[3]),
        (out_x, under),
        (lane, under),
        (lane, over),
        (in_x, over),
        (in_x, target[1]),
    )


def _own_line(box: Box) -> tuple[Point, ...]:
    """From a box's right side back to it, within the gap beside it."""
    x, y, wide, high = box
    out, lower, upper = x + wide + GAP_X * 0.6, y + high * 0.7, y + high * 0.3
    return ((x + wide, lower), (out, lower), (out, upper), (x + wide, upper))


def path(points: Sequence[Point], *, angular: bool = False) -> str:
    """Points as the ``d`` of an SVG path: smooth from top to bottom, or in straight lines."""
    start = points[0]
    parts = [f"M{start[0]:.1f} {start[1]:.1f}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        if angular:
            parts.append(f"L{x1:.1f} {y1:.1f}")
        else:
            middle = (y0 + y1) / 2
            parts.append(f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}")
    return "".join(parts)
