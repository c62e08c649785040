"""Kernels as loops: one TIR function each, vectorised and parallel as written here.

No schedule is applied afterwards. Buffers are read and written as flat row-major arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.tirx import ForKind, SeqStmt

from fuseboard_tvm import _scalar
from fuseboard_tvm._axes import collapsed
from fuseboard_tvm._fusion import Kernel, in_order, is_irregular, sources
from fuseboard_tvm._loops import LANES
from fuseboard_tvm._sums import Sums
from fuseboard_tvm._values import (
    Expr,
    Index,
    Reduce,
    Value,
    broadcast_index,
    number,
    ravel,
    unravel,
    zero,
)

#: Elements of a flat kernel that a thread takes at a time.
CHUNK = 4096


def write(kernel: Kernel, roots: set[Value], threads: int) -> tuple[Any, list[Value]]:
    """The TIR function of a kernel, and the values that it reads, in the order of its parameters.

    What it stores follows them.
    """
    return _Writer(kernel, roots, threads).function()


class _Writer(Sums):
    def __init__(self, kernel: Kernel, roots: set[Value], threads: int) -> None:
        super().__init__(collapsed(kernel, roots), threads)
        self.kernel = kernel
        self.roots = roots

    # --- the whole ---------------------------------------------------------------------------

    def function(self) -> tuple[Any, list[Value]]:
        kernel = self.kernel
        found = (sources(member, self.roots) for member in kernel.members)
        wanted = set().union(*found) - set(kernel.members)
        reads = in_order(kernel, wanted, self.roots)
        parameters = []
        declared = []
        for value in (*reads, *kernel.stored):
            buffer = tirx.decl_buffer(value.shape, value.dtype, name=self.name("p"))
            flat = tirx.decl_buffer(
                (value.numel,), value.dtype, name=self.name("f"), data=buffer.data
            )
            parameters.append(buffer)
            declared.append(tirx.DeclBuffer(flat, data=buffer.data))
            self.flat[value] = flat
        if kernel.lead is None and not isinstance(kernel.members[0], Reduce):
            body = self.points()
        elif kernel.lead is None:
            body = self.columns(kernel.members[0])
        else:
            body = self.rows()
        function = tirx.PrimFunc(parameters, SeqStmt([*declared, *body]))
        return function.with_attr({"tirx.noalias": True}), reads

    # --- points of one shape -----------------------------------------------------------------

    def points(self) -> list[Any]:
        members = self.kernel.members
        shape = self.shape(members[0])
        work = math.prod(shape) * len(members)
        irregular = is_irregular(members, self.roots)

        def body(index: Index) -> None:
            values = [(member, self.computed_once(member, index)) for member in members]
            for member, value in values:
                if member in self.kernel.stored:
                    self.store(self.flat[member], value, ravel(index, shape))

        inner = shape[-1] if shape else 1
        outer = shape[:-1]
        if math.prod(outer) == 1 and inner > CHUNK and not irregular:
            return self.chunks(inner, work, lambda i: body((*(zero() for _ in outer), i)))

        def line(position: Expr) -> None:
            where = unravel(position, outer)
            self.vectors(inner, lambda i: body((*where, i) if shape else ()), not irregular)

        return [self.outer(math.prod(outer), work, line)]

    def computed_once(self, value: Value, index: Index) -> Expr:
        key = (value, tuple(map(id, index)))
        if key not in self.cache:
            self.cache[key] = (self.computed(value, index), index)
        return self.cache[key][0]

    def chunks(self, size: int, work: int, body: Callable[[Expr], None]) -> list[Any]:
        """One long line in pieces."""
        whole = size // CHUNK

        def piece(outer: Expr) -> None:
            self.vectors(CHUNK, lambda i: body(outer * number(CHUNK) + i))

        result = [self.outer(whole, work, piece)]
        done = whole * CHUNK
        if size - done:
            result += self.scope(
                lambda: self.vectors(size - done, lambda i: body(i + number(done)))
            )
        return result

    # --- rows --------------------------------------------------------------------------------

    def rows(self) -> list[Any]:
        lead = self.kernel.lead
        assert lead is not None
        members = self.kernel.members
        work = max(math.prod(_visited(member)) for member in members) * len(members)
        depth = self.depth

        def row(position: Expr) -> None:
            self.row = unravel(position, lead) if depth == len(lead) else (position,)
            if not lead:
                self.row = ()
            for member in members:
                if member in self.kernel.stored:
                    target, base = self.flat[member], True
                else:
                    size = math.prod(self.shape(member)[depth:])
                    target, base = self.allocate(size, member.dtype), False
                if isinstance(member, Reduce):
                    self.reduce_row(member, target, base)
                else:
                    self.point_row(member, target, base)
                if not base:
                    self.local[member] = target

        result = self.outer(math.prod(lead), work, row)
        return [result]

    @property
    def depth(self) -> int:
        """Axes of the row in the shapes that are used here."""
        lead = self.kernel.lead
        assert lead is not None
        return min(1, len(lead)) if self.shapes else len(lead)

    def where(self, member: Value, rest: Index, stored: bool) -> Expr:
        shape = self.shape(member)
        if stored:
            return ravel((*self.row, *rest), shape)
        return ravel(rest, shape[self.depth :])

    def point_row(self, member: Value, target: Any, stored: bool) -> None:
        rest = self.shape(member)[self.depth :]
        inner = rest[-1] if rest else 1

        def line(position: Expr) -> None:
            outer = unravel(position, rest[:-1])

            def one(i: Expr) -> None:
                where = (*outer, i) if rest else ()
                value = self.computed(member, (*self.row, *where))
                self.store(target, value, self.where(member, where, stored))

            self.vectors(inner, one, not is_irregular([member], self.roots))

        self.statements.append(self.loop(math.prod(rest[:-1]), line))

    def reduce_row(self, member: Reduce, target: Any, stored: bool) -> None:
        source = member.inputs[0]
        rest = self.shape(source)[self.depth :]
        one = (zero(),) * (len(self.shape(member)) - self.depth)
        place = self.where(member, one, stored)
        if member.how.startswith("arg"):

            def at(i: Expr) -> Expr:
                return self.at(source, (*self.row, *unravel(i, rest)))

            self.find(member, at, math.prod(rest), target, place)
            return
        outer, inner = rest[:-1], rest[-1] if rest else 1

        def element(position: Expr, i: Expr) -> Expr:
            where = (*unravel(position, outer), i) if rest else ()
            return self.at(source, (*self.row, *where))

        total = self.accumulate(member, math.prod(outer), inner, element)
        self.store(target, total, place)

    def find(
        self,
        member: Reduce,
        element: Callable[[Expr], Expr],
        steps: int,
        target: Any,
        place: Expr,
    ) -> None:
        """argmax or argmin: the first of equal elements, the first NaN."""
        source = member.inputs[0]
        best = self.allocate(1, source.dtype)
        found = self.allocate(1, "int64")
        self.store(best, element(zero()), zero())
        self.store(found, zero(), zero())

        def step(i: Expr) -> None:
            value = element(i)
            old = self.bind(best[zero()])
            better = value > old if member.how == "argmax" else value < old
            if source.dtype in _scalar.FLOATS:
                better = tirx.Or(better, _scalar.is_nan(value))
                better = tirx.And(better, tirx.Not(_scalar.is_nan(old)))
            better = self.bind(better)
            self.store(best, _scalar.select(better, value, old), zero())
            self.store(found, _scalar.select(better, i, found[zero()]), zero())

        self.statements.append(self.loop(steps, step))
        self.store(target, found[zero()], place)

    def accumulate(
        self, member: Reduce, outer: int, inner: int, element: Callable[[Expr, Expr], Expr]
    ) -> Expr:
        """All of one row in one number: in lanes, then across the lanes."""
        lanes = next((n for n in (LANES, 8) if n <= inner), 1)
        if is_irregular([member], self.roots):
            lanes = 1
        total = self.allocate(lanes, member.dtype)
        count = inner // lanes
        done = count * lanes

        def line(position: Expr, into: Any) -> None:
            self.pile(
                member,
                into,
                count,
                lambda k, i: element(position, k * number(lanes) + i if lanes > 1 else k),
            )

            def left(i: Expr) -> None:
                value = element(position, i + number(done))
                self.store(into, _scalar.combine(member.how, into[zero()], value), zero())

            if inner - done:
                self.statements.append(self.loop(inner - done, left))

        self.each(total, lambda i: _scalar.identity(member.how, member.dtype))
        self.piles(member, total, outer, line)
        result = total[zero()]
        if lanes == 1:
            return result

        def across(i: Expr) -> None:
            other = total[i + number(1)]
            self.store(total, _scalar.combine(member.how, total[zero()], other), zero())

        self.statements.append(self.loop(lanes - 1, across))
        return result

    # --- reductions that keep their last axis, or some axis after a reduced one ------------------

    def columns(self, member: Reduce) -> list[Any]:
        source = member.inputs[0]
        shape = self.shape(source)
        axes = _reduced_axes(self.shape(member), shape)
        kept = [axis for axis in range(len(shape)) if axis not in axes]
        inner = kept[-1] if kept and kept[-1] == len(shape) - 1 else None
        outer = [axis for axis in kept if axis != inner]
        width = shape[inner] if inner is not None else 1
        lanes = next((n for n in (LANES, 8, 4) if n <= width), 1)
        if is_irregular([member], self.roots):
            lanes = 1
        sizes = [shape[axis] for axis in axes]
        steps = math.prod(sizes)
        target = self.flat[member]
        arg = member.how.startswith("arg")

        def column(position: Expr, first: Expr, count: int) -> None:
            fixed = dict(
                zip(outer, unravel(position, [shape[axis] for axis in outer]), strict=True)
            )

            def index(k: Expr, lane: Expr) -> Index:
                moving = dict(zip(axes, unravel(k, sizes), strict=True))
                everything = {**fixed, **moving}
                if inner is not None:
                    everything[inner] = first + lane
                return tuple(everything[axis] for axis in range(len(shape)))

            if arg:
                self.find(
                    member,
                    lambda k: self.at(source, index(k, zero())),
                    steps,
                    target,
                    self.place(member, index(zero(), zero())),
                )
            else:
                self.sum_column(member, index, target, steps, count)

        work = math.prod(shape)
        rows = math.prod(shape[axis] for axis in outer)
        whole = 1 if arg else lanes
        pieces = width // whole

        def piece(position: Expr) -> None:
            where = tirx.floordiv(position, number(pieces)) if pieces > 1 else position
            part = tirx.floormod(position, number(pieces)) if pieces > 1 else zero()
            column(where, part * number(whole), whole)

        made = [self.outer(rows * pieces, work, piece)]
        for i in range(pieces * whole, width):
            made.append(self.loop(rows, lambda where, i=i: column(where, number(i), 1)))
        return made

    def sum_column(
        self,
        member: Reduce,
        index: Callable[[Expr, Expr], Index],
        target: Any,
        steps: int,
        count: int,
    ) -> None:
        source = member.inputs[0]
        total = self.allocate(count, member.dtype)
        self.each(total, lambda i: _scalar.identity(member.how, member.dtype))
        self.pile(member, total, steps, lambda k, i: self.at(source, index(k, i)))
        kind = ForKind.VECTORIZED if count > 1 else ForKind.SERIAL

        def store(i: Expr) -> None:
            self.store(target, total[i], self.place(member, index(zero(), i)))

        self.statements.append(self.loop(count, store, kind))

    def place(self, member: Value, index: Index) -> Expr:
        """Where the result for an element lies."""
        return ravel(broadcast_index(index, self.shape(member), zero()), self.shape(member))


def _visited(member: Value) -> tuple[int, ...]:
    return member.inputs[0].shape if isinstance(member, Reduce) else member.shape


def _reduced_axes(result: Sequence[int], source: Sequence[int]) -> list[int]:
    pairs = zip(result, source, strict=True)
    return [axis for axis, (after, before) in enumerate(pairs) if after != before]
