"""Loops over the elements of a kernel: vectors, threads, and what an element is computed from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.tirx import BufferStore, For, ForKind, SeqStmt

from fuseboard_tvm import _scalar
from fuseboard_tvm._values import (
    Expr,
    Gather,
    Index,
    Point,
    Value,
    View,
    broadcast_index,
    number,
    ravel,
    zero,
)

#: Elements of a vector: one or two registers of floats. Wider ones hide more of the latency of
#: additions, but the code grows, and the time that LLVM takes with it.
LANES = 16
#: Elements below which a kernel isn't worth a second thread.
PARALLEL = 1 << 15
#: Elements of the largest buffer that lies on the stack.
STACK = 1 << 12


class Loops:
    """Writes statements one after another; what is written inside of a scope stays there.

    :ivar flat: value → flat buffer of all of it.
    :ivar local: value → buffer of one row.
    :ivar shapes: value → its shape with axes made one; a value that isn't there keeps its own.
    :ivar row: the index of the row that is being written.
    """

    def __init__(self, shapes: Mapping[Value, tuple[int, ...]], threads: int) -> None:
        self.shapes = shapes
        self.threads = threads
        self.flat: dict[Value, Any] = {}
        self.local: dict[Value, Any] = {}
        self.row: Index = ()
        self.statements: list[Any] = []
        self.cache: dict[Any, tuple[Expr, Any]] = {}
        self.names = 0
        self.lane: tuple[Expr, int] | None = None
        self.allocations: list[Any] = []

    def name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def shape(self, value: Value) -> tuple[int, ...]:
        return self.shapes.get(value, value.shape)

    # --- scopes and loops --------------------------------------------------------------------

    def scope(self, write_body: Callable[[], None]) -> list[Any]:
        """The statements that ``write_body`` writes, with values of its own."""
        statements, cache = self.statements, self.cache
        self.statements, self.cache = [], dict(cache)
        write_body()
        made = self.statements
        self.statements, self.cache = statements, cache
        return made

    def loop(self, size: int, body: Callable[[Expr], None], kind: ForKind = ForKind.SERIAL) -> Any:
        """``for i in range(size)``; without a loop where there is one turn."""
        if size == 1:
            made = self.scope(lambda: body(zero()))
            return together(made)
        i = tirx.Var(self.name("i"), "int64")
        if kind == ForKind.VECTORIZED:
            return self.vector(size, i, body)
        made = self.scope(lambda: body(i))
        return For(i, zero(), number(size), kind, together(made))

    def vector(self, lanes: int, lane: Expr, body: Callable[[Expr], None]) -> Any:
        """One vector at a time, after what its values are stored in."""
        self.lane = (lane, lanes)
        made = self.scope(lambda: body(lane))
        self.lane = None
        loop = For(lane, zero(), number(lanes), ForKind.VECTORIZED, together(made))
        allocations, self.allocations = self.allocations, []
        return together([*allocations, loop])

    def vectors(self, size: int, body: Callable[[Expr], None], vectorise: bool = True) -> None:
        """A loop over ``size`` adjacent elements, in vectors, then what is left one by one."""
        lanes = next((n for n in (LANES, 8, 4) if n <= size), 1) if vectorise else 1
        whole = size // lanes
        if lanes == 1:
            self.statements.append(self.loop(size, body))
            return

        def vector(outer: Expr) -> None:
            inner = self.loop(
                lanes, lambda lane: body(outer * number(lanes) + lane), ForKind.VECTORIZED
            )
            self.statements.append(inner)

        self.statements.append(self.loop(whole, vector))
        done = whole * lanes
        if size - done:
            self.statements.append(self.loop(size - done, lambda i: body(i + number(done))))

    def outer(self, size: int, work: int, body: Callable[[Expr], None]) -> Any:
        """The outermost loop: on several threads where that is worth it."""
        many = self.threads > 1 and work >= PARALLEL and size > 1
        return self.loop(size, body, ForKind.PARALLEL if many else ForKind.SERIAL)

    def store(self, buffer: Any, value: Expr, where: Expr) -> None:
        self.statements.append(BufferStore(buffer, value, [where]))

    def allocate(self, size: int, dtype: str) -> Any:
        buffer = tirx.decl_buffer((size,), dtype, name=self.name("t"), scope="local")
        self.statements.append(allocated(buffer))
        return buffer

    # --- elements ----------------------------------------------------------------------------

    def bind(self, value: Expr) -> Expr:
        """An expression stored, so that it is computed once.

        It is stored in an array of the vector's width, which LLVM turns into a register. A ``Bind``
        would say the same, but TVM's analysis looks through it: the time that takes doubles with
        each use, and it can't hold a vector of booleans.
        """
        if isinstance(value, tirx.Var | tirx.IntImm | tirx.FloatImm):
            return value
        dtype = _scalar.dtype_of(value)
        if dtype == "bool":
            return tirx.NE(self.bind(_scalar.cast(value, "int8")), _scalar.const(0, "int8"))
        where, lanes = (zero(), 1) if self.lane is None else self.lane
        buffer = tirx.decl_buffer((lanes,), dtype, name=self.name("v"), scope="local")
        (self.statements if self.lane is None else self.allocations).append(allocated(buffer))
        self.statements.append(BufferStore(buffer, value, [where]))
        return buffer[where]

    def at(self, value: Value, index: Index) -> Expr:
        """The element of a value at an index, given for its (perhaps collapsed) shape."""
        key = (value, tuple(map(id, index)))
        known = self.cache.get(key)
        if known is None:
            known = (self.element(value, index), index)  # the index is kept: its id is the key
            self.cache[key] = known
        return known[0]

    def element(self, value: Value, index: Index) -> Expr:
        if value in self.local:
            depth = len(self.row)
            where = ravel(index[depth:], self.shape(value)[depth:])
            return self.bind(self.local[value][where])
        if value in self.flat:
            return self.bind(self.flat[value][ravel(index, self.shape(value))])
        return self.computed(value, index)

    def computed(self, value: Value, index: Index) -> Expr:
        """An element by its expression."""
        if isinstance(value, View):
            return self.at(value.inputs[0], value.index(index))
        if isinstance(value, Point):
            elements = [
                self.at(one, broadcast_index(index, self.shape(one), zero()))
                for one in value.inputs
            ]
            return self.bind(value.compute(self.bind, *elements))
        if isinstance(value, Gather):
            inputs = value.inputs
            return self.bind(
                value.compute(lambda which, where: self.at(inputs[which], where), index)
            )
        raise AssertionError(f"{type(value).__name__} isn't computed in an expression")


def allocated(buffer: Any) -> Any:
    """The allocation of a buffer: on the stack, or in registers, if it isn't large.

    Without the annotation TVM calls its allocator for each (``lower_tvm_builtin.cc`` in TVM 0.27).
    """
    small = math.prod(int(extent) for extent in buffer.shape) <= STACK
    return tirx.AllocBuffer(buffer, {"disable_lower_builtin": number(1)} if small else None)


def together(statements: Sequence[Any]) -> Any:
    """Statements as one."""
    return statements[0] if len(statements) == 1 else SeqStmt(list(statements))
