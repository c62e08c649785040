"""Repeated blocks: a transformer's layers, ResNet's blocks, in forward and backward graphs alike.

Blocks are found from the graph alone, without module names: a model that is written as a loop over
layers leaves a stretch of nodes whose labels (op, constants, metadata of the result) repeat with a
period. Where such a stretch is cut into instances is free within the period, and decides what a
compiler can still fuse; the cut is put where the values that cross it are in memory anyway, which
is mostly right behind a matrix product. Instances whose wiring agrees node by node become regions
that are lowered once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fuseboard.contracts import BackendInfo, Repeats
from fuseboard.ops.estimate import (
    BYTES_PER_US,
    estimates_us,
    is_contraction,
    is_creation,
    is_free,
    is_view,
    value_bytes,
)
from fuseboard.torch_api import symbols as torch_symbols

#: Blocks of fewer nodes than this aren't worth a region of their own.
MIN_NODES = 12
#: So many lowered nodes must be saved.
MIN_SAVED_NODES = 64
#: What one more call of a region costs in a call of the graph.
CALL_US = 30.0
#: The share of the graph's estimated time that cutting may cost.
MAX_SLOWDOWN = 0.01
#: How many neighbouring labels must agree for a distance to be a candidate period.
_GRAM = 4
#: How many candidate periods are tried on a stretch.
_PERIODS = 12


@dataclass(frozen=True)
class Repeat:
    """Instances of one block, isomorphic node by node.

    :ivar fused_across: values that a compiler of the whole graph would have kept in registers
        and that the cut between two instances puts into memory.
    """

    instances: tuple[tuple[Node, ...], ...]
    fused_across: tuple[Node, ...] = ()

    @property
    def saved(self) -> int:
        """How many nodes needn't be lowered."""
        return (len(self.instances) - 1) * len(self.instances[0])

    def cost_us(self) -> float:
        """What the cuts are estimated to cost in a call of the graph."""
        moved = 2.0 * sum(value_bytes(node.meta.get("val")) for node in self.fused_across)
        return len(self.instances) * (CALL_US + moved / BYTES_PER_US)


def repeated_regions(
    nodes: Sequence[Node],
    placements: Mapping[str, str],
    backends: Sequence[BackendInfo],
    mode: Repeats,
) -> tuple[list[tuple[Node, ...]], list[str]]:
    """The regions that repeated blocks make in a plan, and what to tell of them.

    With ``auto``, only where the backend takes long to compile, enough is saved, and the cuts are
    estimated to cost next to nothing in a call.
    """
    regions: list[tuple[Node, ...]] = []
    notes: list[str] = []
    if mode == "never":
        return regions, notes
    total_us = sum(estimates_us(nodes).values()) if mode == "auto" else 0.0
    placed: dict[str | None, list[Node]] = {}
    for node in nodes:
        placed.setdefault(placements.get(node.name), []).append(node)
    for info in backends:
        if mode == "auto" and (info.compiles_quickly or info is backends[-1]):
            continue
        own = placed.get(info.name, [])
        if len(own) < 2 * MIN_NODES:
            continue
        repeats = find_repeats(own)
        saved = sum(repeat.saved for repeat in repeats)
        cost_us = sum(repeat.cost_us() for repeat in repeats)
        if mode == "auto" and saved < MIN_SAVED_NODES:
            continue
        if mode == "auto" and cost_us > MAX_SLOWDOWN * total_us:
            notes.append(
                f"{info.name} gets its part whole: cutting it into its repeated blocks "
                f"({_described(repeats)}) is estimated to cost {cost_us:.0f} us of "
                f"{total_us:.0f} us a call; repeats='always' cuts it all the same"
            )
            continue
        for repeat in repeats:
            regions.extend(repeat.instances)
            notes.append(f"{info.name} lowers {_described([repeat])} once{_crossing(repeat)}")
    return regions, notes


def _described(repeats: Sequence[Repeat]) -> str:
    return ", ".join(f"a block of {len(r.instances[0])} nodes ×{len(r.instances)}" for r in repeats)


def _crossing(repeat: Repeat) -> str:
    """What the cut materialises, as a clause for the report."""
    if not repeat.fused_across:
        return ""
    names = ", ".join(node.name for node in repeat.fused_across[:3])
    size = sum(value_bytes(node.meta.get("val")) for node in repeat.fused_across)
    return f"; each cut puts into memory what might have been fused: {names} ({size:.0f} bytes)"


def find_repeats(nodes: Sequence[Node]) -> list[Repeat]:
    """The repeated blocks among nodes in graph order; disjoint, and each a contiguous stretch.

    Contiguous stretches of a topological order can be contracted, all at once, without a cycle.
    """
    labels = _labels(nodes)
    found: list[Repeat] = []
    pending = [(0, len(nodes))]
    context: _Boundaries | None = None
    while pending:
        start, end = pending.pop()
        run = _best_run(labels, start, end)
        if run is None:
            continue
        context = context or _Boundaries(nodes)
        first, last, period = run
        begin, cost = context.best_cut(first, last, period)
        count = (last - begin) // period
        stretches = [
            tuple(nodes[begin + k * period : begin + (k + 1) * period]) for k in range(count)
        ]
        found.extend(Repeat(group, cost) for group in _isomorphic(stretches))
        pending += [(start, first), (last, end)]
    return sorted(found, key=lambda repeat: -repeat.saved)


# --- labels and periods -------------------------------------------------------------------------


def _labels(nodes: Sequence[Node]) -> list[int]:
    """A number for each node; equal for equal ops with equal constants and results."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(_label(node), len(numbers)) for node in nodes]


def _label(node: Node) -> tuple[Any, ...]:
    kwargs = _constant(node.kwargs) if node.kwargs else ()
    return (node.target, _constant(node.args), kwargs, _metadata(node.meta.get("val")))


def _constant(value: Any) -> Any:
    """A hashable form of arguments; nodes look alike, and 1, 1.0 and True don't."""
    if isinstance(value, Node):
        return "%"
    if isinstance(value, list | tuple):
        return (list, *map(_constant, value))
    if isinstance(value, int | bool | str | None):
        return (type(value), value)
    if isinstance(value, dict):
        return (dict, *((key, _constant(item)) for key, item in value.items()))
    if isinstance(value, slice):
        return (slice, *map(_constant, (value.start, value.stop, value.step)))
    if isinstance(value, float):
        return (float, repr(value))  # 0.0 and -0.0 differ, and nan is nan
    return (type(value), str(value))


def _metadata(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return (value.dtype, value.device, str(value.layout), _sizes(value.shape))
        if torch_symbols.is_plain(value):
            return (value.dtype, value.device, value.shape, value.stride())
        return (value.dtype, value.device, _sizes(value.shape), _sizes(value.stride()))
    if isinstance(value, list | tuple):
        return tuple(map(_metadata, value))
    return (type(value), str(value))


def _sizes(sizes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(size if type(size) is int else str(size) for size in sizes)


def _best_run(labels: Sequence[int], start: int, end: int) -> tuple[int, int, int] | None:
    """(first, last, period) of the stretch whose repetition saves the most nodes."""
    best: tuple[int, int, int, int] | None = None
    for period in _candidate_periods(labels, start, end):
        for first, last in _runs(labels, start, end, period):
            saved = ((last - first) // period - 1) * period
            if saved >= MIN_NODES and (best is None or saved > best[0]):
                best = (saved, first, last, period)
    return best[1:] if best is not None else None


def _candidate_periods(labels: Sequence[int], start: int, end: int) -> list[int]:
    """Distances at which the same few labels come again, the most frequent first."""
    latest: dict[tuple[int, ...], int] = {}
    votes: Counter[int] = Counter()
    for place in range(start, end - _GRAM + 1):
        gram = tuple(labels[place : place + _GRAM])
        if gram in latest:
            votes[place - latest[gram]] += 1
        latest[gram] = place
    return [p for p, _ in votes.most_common(4 * _PERIODS) if p >= MIN_NODES][:_PERIODS]


def _runs(labels: Sequence[int], start: int, end: int, period: int) -> Iterator[tuple[int, int]]:
    """Maximal stretches, of two periods at least, whose labels are those of one period before."""
    length = 0
    for place in range(start + period, end):
        if labels[place] == labels[place - period]:
            length += 1
            continue
        if length >= period:
            yield place - length - period, place
        length = 0
    if length >= period:
        yield end - length - period, end


# --- where to cut -------------------------------------------------------------------------------


class _Boundaries:
    """What cutting a sequence of nodes in two would cost, for each place.

    A value *crosses* a cut if it is made before and read behind it. It is in memory anyway where a
    contraction (which compilers call as a kernel of its own) made it, or where one lies between
    the value and its reader: nothing is fused across that.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._place = {node: place for place, node in enumerate(nodes)}
        self._depth = self._contraction_depths()

    def _contraction_depths(self) -> dict[Node, int]:
        depths: dict[Node, int] = {}
        for node in self._nodes:
            before = max((depths.get(used, 0) for used in node.all_input_nodes), default=0)
            depths[node] = before + (1 if is_contraction(node) else 0)
        return depths

    def _last_readers(self, node: Node) -> tuple[int, int]:
        """The last place that reads a value, and the last that could be fused with it."""
        last = fused = -1
        pending = list(node.users)
        while pending:
            user = pending.pop()
            place = self._place.get(user)
            if place is None:
                continue
            if is_view(user):
                pending.extend(user.users)
            elif self._depth[user] == self._depth[node] and not is_contraction(node):
                fused = max(fused, place)
            last = max(last, place)
        return last, fused

    def best_cut(self, first: int, last: int, period: int) -> tuple[int, tuple[Node, ...]]:
        """Where the first instance of a run begins, and what each cut puts into memory.

        One instance less is accepted for a better cut, where at least two remain.
        """
        most = (last - first) // period
        middle = first + (most // 2) * period
        window = range(middle, min(middle + period, last))
        sizes, fused = self._crossing(first, window)
        furthest = (last - first) - max(2, most - 1) * period
        options = []
        for offset in range(min(furthest + 1, period)):
            place = window[offset] if offset < len(window) else middle + offset - period
            if place not in window or self._splits_tuple(place):
                continue
            moved = sum(value_bytes(node.meta.get("val")) for node in fused[place])
            count = (last - first - offset) // period
            options.append((moved, sizes[place], -count, offset, place))
        if not options:
            return first, ()
        _, _, _, offset, place = min(options)
        return first + offset, tuple(fused[place])

    def _crossing(
        self, first: int, window: range
    ) -> tuple[dict[int, float], dict[int, list[Node]]]:
        """For each cut in a window: bytes of the values that cross it, and the fusible ones.

        :param first: where the run begins; what is made before it crosses every cut.
        """
        sizes = dict.fromkeys(window, 0.0)
        fused: dict[int, list[Node]] = {place: [] for place in window}
        for made in range(first, window.stop):
            node = self._nodes[made]
            if is_view(node):
                continue
            last, fusible = self._last_readers(node)
            if last < window.start or is_free(node) or is_creation(node):
                continue
            size = value_bytes(node.meta.get("val"))
            for place in range(max(made + 1, window.start), min(last + 1, window.stop)):
                sizes[place] += size
                if place <= fusible:
                    fused[place].append(node)
        return sizes, fused

    def _splits_tuple(self, place: int) -> bool:
        """Whether a cut separates a result of an op from the op."""
        node = self._nodes[place]
        return getattr(node.target, "__name__", "") == "getitem"


# --- isomorphism --------------------------------------------------------------------------------


def _isomorphic(stretches: Sequence[tuple[Node, ...]]) -> list[tuple[tuple[Node, ...], ...]]:
    """Groups of at least two stretches whose wiring agrees node by node."""
    groups: dict[Any, list[tuple[Node, ...]]] = {}
    for stretch in stretches:
        groups.setdefault(_wiring(stretch), []).append(stretch)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _wiring(stretch: Sequence[Node]) -> tuple[Any, ...]:
    """Which node reads which, with what comes from outside numbered by first use."""
    inside = {node: place for place, node in enumerate(stretch)}
    outside: dict[Node, int] = {}
    parts = []
    for node in stretch:
        reads = tuple(
            inside[used] if used in inside else -1 - outside.setdefault(used, len(outside))
            for used in _arguments(node)
        )
        seen = any(user not in inside for user in node.users)
        parts.append((reads, seen))
    return (*parts, *(_metadata(node.meta.get("val")) for node in outside))


def _arguments(node: Node) -> list[Node]:
    """The nodes among the arguments, in order, with repetitions."""
    found: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), lambda used: found.append(used))
    return found
