"""The lines of a kernel: its indices, its passes, what it loads, computes and stores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fuseboard_triton._ir import COMPUTE, HALF, STORED, Value, product, same
from fuseboard_triton._pointwise import BOOLEAN, EXPRESSIONS
from fuseboard_triton._schedule import Item
from fuseboard_triton._torch_internals import Size

if TYPE_CHECKING:
    from fuseboard_triton._codegen import _Printer

#: Axis → stride, for the axes along which something moves.
Pattern = dict[int, Size]


@dataclass
class Tile:
    """One side of a tile: its axes after merging, outermost first, with the index of each."""

    letter: str
    axes: list[int] = field(default_factory=list)
    sizes: list[Size] = field(default_factory=list)

    @property
    def count(self) -> Size:
        return product(self.sizes)


class Body:
    """The lines of one function."""

    def __init__(self, printer: _Printer, persistent: bool) -> None:
        self.p = printer
        self.persistent = persistent
        self.tiled = bool(printer.reduces)
        self.out: list[str] = []
        self.indent = 1
        self.names: dict[Item, str] = {}
        self.reduced = frozenset(printer.group.reduced_axes())

    def line(self, text: str) -> None:
        self.out.append("    " * self.indent + text)

    def lines(self) -> list[str]:
        self._outer_index()
        if not self.tiled:
            self._emit(self._needed(list(self.p.group.members.values())))
            self._stores(self.p.outputs)
        elif self.persistent:
            self.line("r = tl.arange(0, RBLOCK)[None, :].to(INDEX)")
            self._reduced_index()
            self._emit(self._needed(list(self.p.group.members.values()), stop=False))
            self._stores(self.p.outputs)
        else:
            self._passes()
        return self.out

    def _outer_index(self) -> None:
        tail = "[:, None]" if self.tiled else ""
        self.line(f"x = tl.program_id(0).to(INDEX) * XBLOCK + tl.arange(0, XBLOCK){tail}.to(INDEX)")
        self.line(f"xmask = x < {self.p.number(self.p.x.count)}")
        self._parts(self.p.x)

    def _reduced_index(self) -> None:
        self.line(f"rmask = r < {self.p.number(self.p.r.count)}")
        self._parts(self.p.r)

    def _parts(self, tile: Tile) -> None:
        """The index along each axis, from the flat one."""
        if len(tile.axes) < 2:
            return
        for place in range(len(tile.axes)):
            inner = product(tile.sizes[place + 1 :])
            text = tile.letter
            if not same(inner, 1):
                text = f"{text} // {self._parenthesised(inner)}"
            if place:
                text = f"({text}) % {self._parenthesised(tile.sizes[place])}"
            self.line(f"{tile.letter}{place} = {text}")

    def _parenthesised(self, size: Size) -> str:
        return self.p.number(size)

    def _offset(self, pattern: Pattern) -> str:
        terms = []
        for tile in (self.p.x, self.p.r):
            for place, axis in enumerate(tile.axes):
                if axis in pattern:
                    name = tile.letter if len(tile.axes) == 1 else f"{tile.letter}{place}"
                    step = self.p.number(pattern[axis])
                    terms.append(name if step == "1" else f"{name} * {step}")
        return " + ".join(terms)

    def _mask(self, axes: frozenset[int]) -> str:
        masks = []
        if axes - self.reduced:
            masks.append("xmask")
        if axes & self.reduced:
            masks.append("rmask")
        return " & ".join(masks)

    # --- passes ---------------------------------------------------------------------------------

    def _needed(self, wanted: Sequence[Item], stop: bool = True) -> list[Item]:
        """What is to be computed for these, less what has a name already."""
        needed: set[Item] = set()
        pending = list(wanted)
        while pending:
            item = pending.pop()
            if item not in needed and item not in self.names:
                needed.add(item)
                pending.extend(item.args)
        return [item for item in self.p.group.items if item in needed]

    def _passes(self) -> None:
        depth = max(self.p.levels[item] for item in self.p.reduces)
        for level in range(1, depth + 1):
            self._pass([item for item in self.p.reduces if self.p.levels[item] == level], ())
        members = self.p.group.members
        full = [v for v in self.p.outputs if self.p.group.axes_of(members[v]) & self.reduced]
        rows = [v for v in self.p.outputs if v not in full]
        if full:
            self._pass([], full)
        self._emit(self._needed([members[value] for value in rows]))
        self._stores(rows)

    def _pass(self, reduces: Sequence[Item], stored: Sequence[Value]) -> None:
        """One loop over the reduced places: for reductions, or for what is stored at each."""
        wanted = [item.args[0] for item in reduces]
        wanted += [self.p.group.members[value] for value in stored]
        needed = self._needed(wanted)
        self._emit([item for item in needed if not self.p.deps[item] & self.reduced])
        for item in reduces:
            self._accumulator(item)
        self.line(f"for start in range(0, {self.p.number(self.p.r.count)}, RBLOCK):")
        self.indent += 1
        self.line("r = start + tl.arange(0, RBLOCK)[None, :].to(INDEX)")
        self._reduced_index()
        inside = [item for item in needed if self.p.deps[item] & self.reduced]
        self._emit(inside)
        for item in reduces:
            self._accumulate(item)
        self._stores(stored)
        self.indent -= 1
        for item in inside:
            del self.names[item]
        for item in reduces:
            self._finish(item, f"acc{self.p.group.items.index(item)}")

    def _accumulator(self, item: Item) -> None:
        name = f"acc{self.p.group.items.index(item)}"
        kernel_type = COMPUTE[item.value.compute or item.value.dtype]
        neutral = _neutral(item.value)
        self.line(f"{name} = tl.full([XBLOCK, RBLOCK], {neutral}, {kernel_type})")

    def _accumulate(self, item: Item) -> None:
        name = f"acc{self.p.group.items.index(item)}"
        given = self._operand(item.args[0], item.value.compute or item.value.dtype)
        op = {"sum": "add", "max": "maximum", "min": "minimum"}[item.value.op]
        combined = EXPRESSIONS[op].format(name, given)
        self.line(f"{name} = tl.where(rmask, {combined}, {name})")

    def _finish(self, item: Item, source: str) -> None:
        self.names[item] = name = f"v{self.p.group.items.index(item)}"
        self.line(f"{name} = {_reduction(item.value)}({source}, 1)[:, None]")

    # --- values ---------------------------------------------------------------------------------

    def _emit(self, items: Sequence[Item]) -> None:
        for item in items:
            if item in self.names:
                continue
            if item.kind == "reduce":
                self._reduce_tile(item)
                continue
            name = f"v{self.p.group.items.index(item)}"
            self.line(f"{name} = {getattr(self, '_' + item.kind)(item)}")
            self.names[item] = name

    def _reduce_tile(self, item: Item) -> None:
        value = item.value
        given = self._operand(item.args[0], value.compute or value.dtype)
        name = f"t{self.p.group.items.index(item)}"
        kernel_type = COMPUTE[value.compute or value.dtype]
        neutral = f"tl.full([1, 1], {_neutral(value)}, {kernel_type})"
        self.line(
            f"{name} = tl.where(rmask, tl.broadcast_to({given}, [XBLOCK, RBLOCK]), {neutral})"
        )
        self._finish(item, name)

    def _operand(self, item: Item, dtype: torch.dtype) -> str:
        own, wanted = COMPUTE[item.value.dtype], COMPUTE[dtype]
        return self.names[item] if own == wanted else f"{self.names[item]}.to({wanted})"

    def _load(self, item: Item) -> str:
        pattern = self.p.patterns[item]
        pointer = f"in{self.p.inputs.index(item.value)}"
        ones = "[1, 1]" if self.tiled else "[1]"
        if not pattern:  # a single number for all places
            return f"tl.full({ones}, tl.load({pointer}){self._widened(item)}, {self._kind(item)})"
        mask = self._mask(frozenset(pattern))
        offset = self._offset(pattern)
        return f"tl.load({pointer} + ({offset}), mask={mask}, other=0){self._widened(item)}"

    def _kind(self, item: Item) -> str:
        return COMPUTE[item.value.dtype]

    def _widened(self, item: Item) -> str:
        return f".to({self._kind(item)})"

    def _const(self, item: Item) -> str:
        ones = "[1, 1]" if self.tiled else "[1]"
        number = item.value.param
        if item.value.dtype.is_floating_point:
            text = _float(float(number))
        else:
            text = str(int(number))
        return f"tl.full({ones}, {text}, {COMPUTE[item.value.dtype]})"

    def _symbol(self, item: Item) -> str:
        ones = "[1, 1]" if self.tiled else "[1]"
        return f"tl.full({ones}, {self.p.number(item.value.param)}, tl.int64)"

    def _index(self, item: Item) -> str:
        offset = self._offset(self.p.patterns[item])
        if not offset:
            return f"tl.full({'[1, 1]' if self.tiled else '[1]'}, 0, tl.int64)"
        return f"({offset}).to(tl.int64)"

    def _pointwise(self, item: Item) -> str:
        value = item.value
        assert value.compute is not None
        if value.op == "cast":
            return self._cast(item)
        operands = [self._operand(arg, value.compute) for arg in item.args]
        if value.op == "where":
            operands[0] = self.names[item.args[0]]
        text = EXPRESSIONS[value.op].format(*operands, c=COMPUTE[value.compute])
        result = "tl.int1" if value.op in BOOLEAN else COMPUTE[value.compute]
        wanted = COMPUTE[value.dtype]
        return text if result == wanted else f"{text}.to({wanted})"

    def _cast(self, item: Item) -> str:
        (arg,) = item.args
        given, wanted = self.names[arg], STORED[item.value.dtype]
        if item.value.dtype in HALF:
            return f"narrow({given}.to(tl.float32), {wanted}).to(tl.float32)"
        return f"{given}.to({wanted})"

    def _stores(self, values: Sequence[Value]) -> None:
        for value in values:
            item = self.p.group.members[value]
            axes = self.p.group.axes_of(item)
            offset = self._offset(self.p.patterns[value]) or "x * 0"
            masks = ["xmask"]
            if self.tiled and axes & self.reduced:
                masks.append("rmask")
                offset = f"tl.broadcast_to({offset}, [XBLOCK, RBLOCK])"
            elif self.tiled:
                offset = f"tl.broadcast_to({offset}, [XBLOCK, 1])"
            stored = self.names[item]
            if COMPUTE[value.dtype] != STORED[value.dtype]:
                stored = f"narrow({stored}, {STORED[value.dtype]})"
            pointer = f"out{self.p.outputs.index(value)}"
            self.line(f"tl.store({pointer} + ({offset}), {stored}, mask={' & '.join(masks)})")


def _float(number: float) -> str:
    return repr(number) if math.isfinite(number) else f"float('{number}')"


def _reduction(value: Value) -> str:
    if value.op == "sum":
        return "tl.sum"
    floating = (value.compute or value.dtype).is_floating_point
    return f"{value.op}_rows" if floating else f"tl.{value.op}"


def _neutral(value: Value) -> str:
    dtype = value.compute or value.dtype
    if value.op == "sum":
        return "0"
    if dtype.is_floating_point:
        return "float('-inf')" if value.op == "max" else "float('inf')"
    info = torch.iinfo(dtype)
    return str(info.min if value.op == "max" else info.max)
