"""A graph as a tree of boxes for the page: regions, repeated stretches, parts of what is long.

Every box holds a contiguous stretch of a topological order, so the boxes of one level never depend
on each other in a circle, whichever of them are open. A repeat is equal neighbours in that order:
regions that share their lowered code; inside a region the same ops on the same shapes.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fuseboard.report.data import GraphReport

#: A box with more children than this gets parts, so that every level is quick to draw.
MOST_CHILDREN = 60
#: A part has about so many ops.
PART = 40
#: A repeated stretch of ops is folded from this many ops on, all its copies together.
LEAST_REPEATED = 12
#: Looking for repeats compares each op with this many that follow at most.
LONGEST_PERIOD = 2048
_COMPARISONS = 4_000_000

BoxKind = Literal["op", "region", "board", "repeat", "copy", "part"]


@dataclass
class Box:
    """What is drawn as one thing.

    :ivar kind: ``op`` (a node), ``region``, ``board`` (neighbouring nodes that the board runs),
        ``repeat`` (its children are alike), ``copy`` (one of those, where that is several boxes) or
        ``part`` (a stretch of a long box).
    :ivar node: position in ``GraphReport.nodes`` of an ``op``.
    :ivar region: position in ``GraphReport.regions`` of a ``region``.
    :ivar copies: how many copies a ``repeat`` holds; its children are parts where they are many.
    """

    kind: BoxKind
    node: int = -1
    region: int = -1
    copies: int = 0
    children: list[Box] = field(default_factory=list)

    def nodes(self) -> list[int]:
        """The positions of the nodes inside."""
        return sorted(box.node for box in self._walk() if box.kind == "op")

    def _walk(self) -> Iterator[Box]:
        yield self
        for child in self.children:
            yield from child._walk()


def fold(graph: GraphReport) -> list[Box]:
    """The boxes of the outermost level, in a topological order."""
    inputs = _inputs(graph)
    units = _units(graph, inputs)
    keys = [_unit_key(graph, unit) for unit in units]
    return _parted(_repeats(units, keys, least=2, shortest=1), inputs)


def _inputs(graph: GraphReport) -> list[list[int]]:
    """For each node the positions of the nodes that it reads."""
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    return [[position[n] for n in node.inputs if n in position] for node in graph.nodes]


# --- the outermost level --------------------------------------------------------------------------


def _units(graph: GraphReport, inputs: list[list[int]]) -> list[Box]:
    """Regions, and runs of the board's own nodes, in a topological order."""
    number = {region.name: i for i, region in enumerate(graph.regions)}
    members: dict[tuple[int, int], list[int]] = {}
    home: list[tuple[int, int]] = []
    for i, node in enumerate(graph.nodes):
        # (region, -1), or (-1, node) for what the board runs by itself
        key = (number[node.region], -1) if node.region in number else (-1, i)
        home.append(key)
        members.setdefault(key, []).append(i)
    after: dict[tuple[int, int], set[tuple[int, int]]] = {key: set() for key in members}
    for i, used in enumerate(inputs):
        for j in used:
            if home[j] != home[i]:
                after[home[j]].add(home[i])
    units: list[Box] = []
    for key in _topological(after, {key: nodes[0] for key, nodes in members.items()}):
        region, _ = key
        nodes = members[key]
        if region >= 0:
            units.append(Box("region", region=region, children=_stretch(graph, nodes, inputs)))
        elif units and units[-1].kind == "board":
            units[-1].children.append(Box("op", node=nodes[0]))
        else:
            units.append(Box("board", children=[Box("op", node=nodes[0])]))
    return units


def _topological(
    after: dict[tuple[int, int], set[tuple[int, int]]], first: dict[tuple[int, int], int]
) -> list[tuple[int, int]]:
    """Keys so that each follows what it reads, those with the earliest nodes first.

    A region that reads a node of the board has a copy of that node, so on paper the two may wait
    for each other. Then the earliest goes first.
    """
    waiting = dict.fromkeys(after, 0)
    for followers in after.values():
        for key in followers:
            waiting[key] += 1
    ready = [(first[key], key) for key, count in waiting.items() if not count]
    heapq.heapify(ready)
    stuck = sorted((first[key], key) for key in after)
    order: dict[tuple[int, int], None] = {}
    while len(order) < len(after):
        _, key = heapq.heappop(ready) if ready else stuck.pop(0)
        if key in order:
            continue
        order[key] = None
        for follower in after[key]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (first[follower], follower))
    return list(order)


def _unit_key(graph: GraphReport, unit: Box) -> Hashable:
    """Equal for units that run the same lowered code."""
    if unit.kind == "region":
        region = graph.regions[unit.region]
        return region.same_as or region.name
    return tuple(graph.nodes[i].op for i in unit.nodes())


# --- inside a region ------------------------------------------------------------------------------


def _stretch(graph: GraphReport, nodes: list[int], inputs: list[list[int]]) -> list[Box]:
    """The ops of a region: repeated ones folded, long stretches in parts."""
    ops = [Box("op", node=i) for i in nodes]
    keys = [(graph.nodes[i].op, graph.nodes[i].value) for i in nodes]
    return _parted(_repeats(ops, keys, LEAST_REPEATED, 3, _crossing(nodes, inputs)), inputs)


def _crossing(nodes: Sequence[int], inputs: list[list[int]]) -> list[int]:
    """For each position, how many values from before it are read at it or after."""
    at = {node: i for i, node in enumerate(nodes)}
    last = list(range(len(nodes)))
    for i, node in enumerate(nodes):
        for used in inputs[node]:
            if used in at:
                last[at[used]] = max(last[at[used]], i)
    change = [0] * (len(nodes) + 1)
    for i, end in enumerate(last):
        if end > i:
            change[i + 1] += 1
            change[end + 1] -= 1
    crossing, now = [], 0
    for step in change[:-1]:
        now += step
        crossing.append(now)
    return crossing


# --- repeats --------------------------------------------------------------------------------------


def _repeats(
    boxes: list[Box],
    keys: Sequence[Hashable],
    least: int,
    shortest: int,
    crossing: Sequence[int] | None = None,
) -> list[Box]:
    """The boxes, with neighbours of equal keys in one ``repeat``; inside of the copies likewise.

    :param least: how many boxes all copies together must have.
    :param shortest: how many boxes one copy must have.
    :param crossing: how many values cross the boundary before each box. Where a repeat may begin at
        several places, it begins where the fewest do.
    """
    numbers: dict[Hashable, int] = {}
    ints = [numbers.setdefault(key, len(numbers)) for key in keys]
    crossing = crossing or [0] * len(boxes)

    def folded(low: int, high: int) -> list[Box]:
        found = _largest_repeat(ints[low:high], crossing[low:high], least, shortest)
        if found is None:
            return boxes[low:high]
        start, period, count = found
        start += low
        copies = []
        for i in range(start, start + count * period, period):
            inside = folded(i, i + period)
            copies.append(inside[0] if len(inside) == 1 else Box("copy", children=inside))
        end = start + count * period
        repeat = Box("repeat", copies=count, children=copies)
        return [*folded(low, start), repeat, *folded(end, high)]

    return folded(0, len(boxes))


def _largest_repeat(
    keys: Sequence[int], crossing: Sequence[int], least: int, shortest: int
) -> tuple[int, int, int] | None:
    """Start, period and count of the repeat that saves most boxes; None where there is none."""
    n = len(keys)
    best: tuple[int, int, int] | None = None
    saved = 0
    for period in range(shortest, min(n // 2, LONGEST_PERIOD, _COMPARISONS // max(n, 1)) + 1):
        for start, length in _runs(keys, period):
            count = length // period + 1
            if count * period >= least and (count - 1) * period > saved:
                saved = (count - 1) * period
                slack = range(start, start + length % period + 1)
                best = (min(slack, key=crossing.__getitem__), period, count)
    return best


def _runs(keys: Sequence[int], period: int) -> Iterator[tuple[int, int]]:
    """Where, and for how long, each key equals the one a period later; at least for a period."""
    length = 0
    for i, same in enumerate(map(int.__eq__, keys, keys[period:])):
        if same:
            length += 1
            continue
        if length >= period:
            yield i - length, length
        length = 0
    if length >= period:
        yield len(keys) - period - length, length


# --- parts ----------------------------------------------------------------------------------------


def _parted(boxes: list[Box], inputs: list[list[int]]) -> list[Box]:
    """The same boxes, in parts where they are many; cut where few values cross."""
    for box in boxes:
        if box.kind in ("repeat", "copy"):
            box.children = _parted(box.children, inputs)
    if len(boxes) <= MOST_CHILDREN:
        return boxes
    owner = {node: i for i, box in enumerate(boxes) for node in box.nodes()}
    reads = [
        sorted({owner[j] for node in box.nodes() for j in inputs[node] if j in owner} - {i})
        for i, box in enumerate(boxes)
    ]
    crossing = _crossing(range(len(boxes)), reads)
    parts: list[Box] = []
    start = 0
    while len(boxes) - start > PART:
        ends = range(start + PART // 2, start + PART + 1)
        end = min(reversed(ends), key=crossing.__getitem__)
        parts.append(Box("part", children=boxes[start:end]))
        start = end
    parts.append(Box("part", children=boxes[start:]))
    return _parted(parts, inputs)
