"""Prints a group as the source of one ``@triton.jit`` function.

A kernel without reductions runs over one flat index. One with reductions runs over a tile of outer
by reduced places: *persistent* where all reduced places fit into one tile, else *looped*, with one
pass for each level of reductions that wait for one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fuseboard_triton._body import Body, Pattern, Tile
from fuseboard_triton._ir import Value, same
from fuseboard_triton._schedule import Group, Item
from fuseboard_triton._torch_internals import Size


@dataclass(frozen=True)
class KernelSource:
    """A group as source.

    :ivar persistent: source where a tile holds all reduced places; "" without reductions.
    :ivar looped: source for any number of reduced places, or for a kernel without reductions.
    :ivar inputs: what is read, in the order of arguments.
    :ivar outputs: what is stored, the arguments that follow.
    :ivar numbers: the sizes and strides that aren't known before a call, the arguments after that.
    :ivar outer: how many places the grid runs over.
    :ivar reduced: how many are reduced; None without reductions.
    :ivar columns: memory is contiguous along the outer places, not along the reduced ones.
    :ivar extents: of each tensor, the distance to its last element: more than 2**31 needs wide
        indices.
    """

    name: str
    persistent: str
    looped: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    numbers: tuple[Size, ...]
    outer: Size
    reduced: Size | None
    columns: bool
    extents: tuple[Size, ...]


def kernel_source(
    group: Group, strides: Callable[[Value], Sequence[Size]], hint: Callable[[Size], int]
) -> KernelSource:
    """Print a group.

    :param strides: those of a value in memory.
    """
    return _Printer(group, strides, hint).print()


class _Printer:
    def __init__(
        self, group: Group, strides: Callable[[Value], Sequence[Size]], hint: Callable[[Size], int]
    ) -> None:
        self.group = group
        self.axes = group.axes
        self.strides = strides
        self.hint = hint
        self.inputs = tuple(dict.fromkeys(load.value for load in group.loads()))
        self.outputs = tuple(group.members)
        self.numbers: dict[Size, str] = {}
        self.reduces = [item for item in group.items if item.kind == "reduce"]
        self.patterns = self._patterns()
        self.deps = self._dependencies()
        reduced = group.reduced_axes()
        self.x = self._tile("x", group.outer_axes())
        self.r = self._tile("r", reduced)
        self.levels = self._levels()

    # --- axes -----------------------------------------------------------------------------------

    def _patterns(self) -> dict[object, Pattern]:
        """How loads, positions and stores move with the axes. Stores go by their value."""
        found: dict[object, Pattern] = {}
        for item in self.group.items:
            if item.kind == "load":
                found[item] = self._pattern(item, self.strides(item.value))
            elif item.kind == "index":
                steps = [int(dim == item.value.param) for dim in range(len(item.labels))]
                found[item] = self._pattern(item, steps)
        for value, item in self.group.members.items():
            found[value] = self._pattern(item, self.strides(value))
        return found

    def _pattern(self, item: Item, strides: Sequence[Size]) -> Pattern:
        pattern: Pattern = {}
        for label, stride in zip(item.labels, strides, strict=True):
            step = stride
            for axis in reversed(self.axes.resolve(label)):
                if not same(step, 0):
                    pattern[axis] = step
                step = step * self.axes.sizes[axis]
        return pattern

    def _dependencies(self) -> dict[Item, frozenset[int]]:
        """The axes along which an item's value differs."""
        deps: dict[Item, frozenset[int]] = {}
        reduced = self.group.reduced_axes()
        for item in self.group.items:
            own = frozenset(self.patterns.get(item, ()))
            for arg in item.args:
                own |= deps[arg]
            deps[item] = own - reduced if item.kind == "reduce" else own
        return deps

    def _tile(self, letter: str, axes: frozenset[int]) -> Tile:
        """Order axes as the largest tensors lie in memory, and merge what lies together."""
        tile = Tile(letter)
        for axis in self._in_order(axes):
            if tile.axes and self._merge(tile.axes[-1], axis):
                tile.sizes[-1] = tile.sizes[-1] * self.axes.sizes[axis]
                tile.axes[-1] = axis
            else:
                tile.axes.append(axis)
                tile.sizes.append(self.axes.sizes[axis])
        return tile

    def _in_order(self, axes: frozenset[int]) -> list[int]:
        keys = [*self.outputs, *(item for item in self.patterns if isinstance(item, Item))]
        covering = [key for key in keys if axes <= set(self.patterns[key])]
        if not covering:
            return sorted(axes)
        pattern = self.patterns[covering[0]]
        return sorted(axes, key=lambda axis: (-self.hint(pattern[axis]), axis))

    def _merge(self, outer: int, inner: int) -> bool:
        """Whether everything moves along two axes as along one; ``inner`` then stands for both."""
        size = self.axes.sizes[inner]
        for pattern in self.patterns.values():
            if (outer in pattern) != (inner in pattern):
                return False
            if outer in pattern and not same(pattern[outer], pattern[inner] * size):
                return False
        return True

    def _levels(self) -> dict[Item, int]:
        """How many reductions an item waits for, one after the other."""
        levels: dict[Item, int] = {}
        for item in self.group.items:
            below = max((levels[arg] for arg in item.args), default=0)
            levels[item] = below + (item.kind == "reduce")
        return levels

    # --- printing -------------------------------------------------------------------------------

    def print(self) -> KernelSource:
        looped = self._function(persistent=False)
        persistent = self._function(persistent=True) if self.reduces else ""
        extents = []
        for key, pattern in self.patterns.items():
            if not (isinstance(key, Item) and key.kind == "index"):
                steps = [step * (self.axes.sizes[axis] - 1) for axis, step in pattern.items()]
                extents.append(sum(steps, start=0))
        return KernelSource(
            name=self._name(),
            persistent=persistent,
            looped=looped,
            inputs=self.inputs,
            outputs=self.outputs,
            numbers=tuple(self.numbers),
            outer=self.x.count,
            reduced=self.r.count if self.reduces else None,
            columns=self._is_columns(),
            extents=tuple(extents),
        )

    def _is_columns(self) -> bool:
        """Whether what is reduced lies in memory with the outer places side by side."""
        if not self.reduces or not self.r.axes or not self.x.axes:
            return False
        last, first = self.r.axes[-1], self.x.axes[-1]
        both = [p for p in self.patterns.values() if last in p and first in p]
        return bool(both) and all(
            self.hint(pattern[first]) < self.hint(pattern[last]) for pattern in both
        )

    def _name(self) -> str:
        """From the ops that it computes, so that profiles can be read."""
        ops = [
            item.value.op
            for item in self.group.items
            if item.kind in ("pointwise", "reduce") and item.value.op not in ("keep", "cast")
        ]
        return "_".join(["fused", *dict.fromkeys(ops)])[:60]

    def number(self, size: Size) -> str:
        """A size in the source: itself, or the argument that holds it."""
        if isinstance(size, int):
            return str(size)
        if getattr(size, "is_Integer", False):
            return str(int(size))
        return self.numbers.setdefault(size, f"n{len(self.numbers)}")

    def _function(self, persistent: bool) -> str:
        body = Body(self, persistent)
        lines = body.lines()
        blocks = ["XBLOCK", "RBLOCK"] if self.reduces else ["XBLOCK"]
        arguments = [
            *(f"in{i}" for i in range(len(self.inputs))),
            *(f"out{i}" for i in range(len(self.outputs))),
            *self.numbers.values(),
            *(f"{name}: tl.constexpr" for name in ("INDEX", *blocks)),
        ]
        return "\n".join([f"@triton.jit\ndef {self._name()}({', '.join(arguments)}):", *lines, ""])
