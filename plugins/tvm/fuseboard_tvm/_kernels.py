"""Kernels as loops: one TIR function each, vectorised and parallel as written here.

No schedule is applied afterwards. Buffers are read and written as flat row-major arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.tirx import BufferStore, For, ForKind, SeqStmt

from fuseboard_tvm import _scalar
from fuseboard_tvm._fusion import Kernel, sources
from fuseboard_tvm._values import (
    Expr,
    Gather,
    Index,
    Point,
    Reduce,
    Value,
    View,
    broadcast_index,
    number,
    ravel,
    unravel,
    zero,
)

#: Elements of a vector: one or two registers of floats. Wider ones hide more of the latency of
#: additions, but the code grows, and the time that LLVM takes with it.
LANES = 16
#: Elements that one lane sums up before it is added to a total, which bounds the rounding error.
BLOCK = 64
#: Elements below which a kernel isn't worth a second thread.
PARALLEL = 1 << 15
#: Elements of a flat kernel that a thread takes at a time.
CHUNK = 4096

_LEAST = {"int8": -(2**7), "int16": -(2**15), "int32": -(2**31), "int64": -(2**63), "uint8": 0}
_MOST = {"int8": 2**7 - 1, "int16": 2**15 - 1, "int32": 2**31 - 1, "int64": 2**63 - 1, "uint8": 255}


def write(kernel: Kernel, roots: set[Value], threads: int) -> tuple[Any, list[Value]]:
    """The TIR function of a kernel, and the values that it reads, in the order of its parameters.

    What it stores follows them.
    """
    return _Writer(kernel, roots, threads).function()


class _Writer:
    def __init__(self, kernel: Kernel, roots: set[Value], threads: int) -> None:
        self.kernel = kernel
        self.roots = roots
        self.threads = threads
        self.flat: dict[Value, Any] = {}  # value → flat buffer
        self.local: dict[Value, Any] = {}  # value → buffer of one row
        self.shapes = _collapsed(kernel, roots)
        self.row: Index = ()
        self.statements: list[Any] = []
        self.cache: dict[Any, tuple[Expr, Any]] = {}
        self.names = 0
        self.lane: tuple[Expr, int] | None = None
        self.allocations: list[Any] = []

    # --- the whole ---------------------------------------------------------------------------

    def function(self) -> tuple[Any, list[Value]]:
        kernel = self.kernel
        found = (sources(member, self.roots) for member in kernel.members)
        wanted = set().union(*found) - set(kernel.members)
        reads = _in_order(kernel, wanted, self.roots)
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
            return _together(made)
        i = tirx.Var(self.name("i"), "int64")
        if kind == ForKind.VECTORIZED:
            return self.vector(size, i, body)
        made = self.scope(lambda: body(i))
        return For(i, zero(), number(size), kind, _together(made))

    def vector(self, lanes: int, lane: Expr, body: Callable[[Expr], None]) -> Any:
        """One vector at a time, after what its values are stored in."""
        self.lane = (lane, lanes)
        made = self.scope(lambda: body(lane))
        self.lane = None
        loop = For(lane, zero(), number(lanes), ForKind.VECTORIZED, _together(made))
        allocations, self.allocations = self.allocations, []
        return _together([*allocations, loop])

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
        self.statements.append(tirx.AllocBuffer(buffer))
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
        (self.statements if self.lane is None else self.allocations).append(
            tirx.AllocBuffer(buffer)
        )
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

    # --- points of one shape -----------------------------------------------------------------

    def points(self) -> list[Any]:
        members = self.kernel.members
        shape = self.shape(members[0])
        work = math.prod(shape) * len(members)
        irregular = _is_scalar(members, self.roots)

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

            self.vectors(inner, one, not _is_scalar([member], self.roots))

        self.statements.append(self.loop(math.prod(rest[:-1]), line))

    def reduce_row(self, member: Reduce, target: Any, stored: bool) -> None:
        source = member.inputs[0]
        rest = self.shape(source)[self.depth :]
        one = (zero(),) * (len(self.shape(member)) - self.depth)
        place = self.where(member, one, stored)
        if member.how.startswith("arg"):
            self.find(member, rest, target, place)
            return
        outer, inner = rest[:-1], rest[-1] if rest else 1

        def element(position: Expr, i: Expr) -> Expr:
            where = (*unravel(position, outer), i) if rest else ()
            return self.at(source, (*self.row, *where))

        total = self.accumulate(member, math.prod(outer), inner, element)
        self.store(target, total, place)

    def find(self, member: Reduce, rest: tuple[int, ...], target: Any, place: Expr) -> None:
        """argmax or argmin: the first of equal elements, the first NaN."""
        source = member.inputs[0]
        best = self.allocate(1, source.dtype)
        found = self.allocate(1, "int64")
        first = unravel(zero(), rest)
        self.store(best, self.at(source, (*self.row, *first)), zero())
        self.store(found, zero(), zero())

        def step(i: Expr) -> None:
            value = self.at(source, (*self.row, *unravel(i, rest)))
            old = self.bind(best[zero()])
            better = value > old if member.how == "argmax" else value < old
            if source.dtype in _scalar.FLOATS:
                nan = tirx.And(_scalar.is_nan(value), tirx.Not(_scalar.is_nan(old)))
                better = tirx.Or(better, nan)
                better = tirx.And(better, tirx.Not(_scalar.is_nan(old)))
            better = self.bind(better)
            self.store(best, _scalar.select(better, value, old), zero())
            self.store(found, _scalar.select(better, i, found[zero()]), zero())

        self.statements.append(self.loop(math.prod(rest), step))
        self.store(target, found[zero()], place)

    def accumulate(
        self, member: Reduce, outer: int, inner: int, element: Callable[[Expr, Expr], Expr]
    ) -> Expr:
        """All of one row in one number: in lanes, these in blocks, then across the lanes."""
        dtype = member.dtype
        lanes = next((n for n in (LANES, 8) if n <= inner), 1)
        irregular = _is_scalar([member], self.roots)
        if irregular:
            lanes = 1
        start = _identity(member.how, dtype)
        block = self.allocate(lanes, dtype)
        total = self.allocate(lanes, dtype)
        count = inner // lanes

        def each(body: Callable[[Expr], None]) -> None:
            kind = ForKind.VECTORIZED if lanes > 1 else ForKind.SERIAL
            self.statements.append(self.loop(lanes, body, kind))

        def add_block() -> None:
            each(lambda i: self.store(total, _combine(member.how, total[i], block[i]), i))

        def run(position: Expr, first: Expr, steps: int) -> None:
            each(lambda i: self.store(block, start, i))

            def step(k: Expr) -> None:
                def lane(i: Expr) -> None:
                    value = element(position, (first + k) * number(lanes) + i)
                    self.store(block, _combine(member.how, block[i], value), i)

                each(lane)

            self.statements.append(self.loop(steps, step))
            add_block()

        def line(position: Expr) -> None:
            whole = count // BLOCK
            if whole:
                blocks = self.loop(whole, lambda b: run(position, b * number(BLOCK), BLOCK))
                self.statements.append(blocks)
            if count - whole * BLOCK:
                run(position, number(whole * BLOCK), count - whole * BLOCK)
            done = count * lanes

            def left(i: Expr) -> None:
                value = element(position, i + number(done))
                self.store(total, _combine(member.how, total[zero()], value), zero())

            if inner - done:
                self.statements.append(self.loop(inner - done, left))

        each(lambda i: self.store(total, start, i))
        self.statements.append(self.loop(outer, line))
        result = total[zero()]
        if lanes == 1:
            return result

        def across(i: Expr) -> None:
            other = total[i + number(1)]
            self.store(total, _combine(member.how, total[zero()], other), zero())

        self.statements.append(self.loop(lanes - 1, across))
        return result

    # --- reductions that keep their last axis, or some axis after a reduced one ------------------

    def columns(self, member: Reduce) -> list[Any]:
        source = member.inputs[0]
        shape = self.shape(source)
        axes = _reduced(self.shape(member), shape)
        kept = [axis for axis in range(len(shape)) if axis not in axes]
        inner = kept[-1] if kept and kept[-1] == len(shape) - 1 else None
        outer = [axis for axis in kept if axis != inner]
        width = shape[inner] if inner is not None else 1
        lanes = next((n for n in (LANES, 8, 4) if n <= width), 1)
        if _is_scalar([member], self.roots):
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
                self.find_column(member, index, target, steps)
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

    def find_column(
        self, member: Reduce, index: Callable[[Expr, Expr], Index], target: Any, steps: int
    ) -> None:
        source = member.inputs[0]
        place = self.place(member, index(zero(), zero()))
        best = self.allocate(1, source.dtype)
        found = self.allocate(1, "int64")
        self.store(best, self.at(source, index(zero(), zero())), zero())
        self.store(found, zero(), zero())

        def step(k: Expr) -> None:
            value = self.at(source, index(k, zero()))
            old = self.bind(best[zero()])
            better = value > old if member.how == "argmax" else value < old
            if source.dtype in _scalar.FLOATS:
                better = tirx.Or(better, _scalar.is_nan(value))
                better = tirx.And(better, tirx.Not(_scalar.is_nan(old)))
            better = self.bind(better)
            self.store(best, _scalar.select(better, value, old), zero())
            self.store(found, _scalar.select(better, k, found[zero()]), zero())

        self.statements.append(self.loop(steps, step))
        self.store(target, found[zero()], place)

    def sum_column(
        self,
        member: Reduce,
        index: Callable[[Expr, Expr], Index],
        target: Any,
        steps: int,
        count: int,
    ) -> None:
        source, how = member.inputs[0], member.how
        block = self.allocate(count, member.dtype)
        total = self.allocate(count, member.dtype)
        start = _identity(how, member.dtype)
        kind = ForKind.VECTORIZED if count > 1 else ForKind.SERIAL

        def each(body: Callable[[Expr], None]) -> None:
            self.statements.append(self.loop(count, body, kind))

        def run(first: Expr, size: int) -> None:
            each(lambda i: self.store(block, start, i))

            def step(k: Expr) -> None:
                def lane(i: Expr) -> None:
                    value = self.at(source, index(first + k, i))
                    self.store(block, _combine(how, block[i], value), i)

                each(lane)

            self.statements.append(self.loop(size, step))
            each(lambda i: self.store(total, _combine(how, total[i], block[i]), i))

        each(lambda i: self.store(total, start, i))
        whole = steps // BLOCK
        if whole:
            self.statements.append(self.loop(whole, lambda b: run(b * number(BLOCK), BLOCK)))
        if steps - whole * BLOCK:
            run(number(whole * BLOCK), steps - whole * BLOCK)
        each(lambda i: self.store(target, total[i], self.place(member, index(zero(), i))))

    def place(self, member: Value, index: Index) -> Expr:
        """Where the result for an element lies."""
        return ravel(broadcast_index(index, self.shape(member), zero()), self.shape(member))


def _together(statements: Sequence[Any]) -> Any:
    return statements[0] if len(statements) == 1 else SeqStmt(list(statements))


def _identity(how: str, dtype: str) -> Expr:
    if how in ("sum", "prod"):
        return _scalar.const(0 if how == "sum" else 1, dtype)
    least = how == "max"
    if dtype in _scalar.FLOATS:
        return _scalar.const(-math.inf if least else math.inf, dtype)
    return _scalar.const(_LEAST[dtype] if least else _MOST[dtype], dtype)


def _combine(how: str, a: Expr, b: Expr) -> Expr:
    if how == "sum":
        return _scalar.add(a, b)
    if how == "prod":
        return _scalar.mul(a, b)
    return _scalar.maximum(a, b) if how == "max" else _scalar.minimum(a, b)


def _visited(member: Value) -> tuple[int, ...]:
    return member.inputs[0].shape if isinstance(member, Reduce) else member.shape


def _reduced(result: Sequence[int], source: Sequence[int]) -> list[int]:
    pairs = zip(result, source, strict=True)
    return [axis for axis, (after, before) in enumerate(pairs) if after != before]


def _in_order(kernel: Kernel, wanted: set[Value], roots: set[Value]) -> list[Value]:
    """What a kernel reads, in an order that depends on the graph alone."""
    found: dict[Value, None] = {}
    seen: set[Value] = set()

    def visit(value: Value) -> None:
        stack = [value]
        while stack:
            one = stack.pop()
            if one in seen:
                continue
            seen.add(one)
            if one in wanted:
                found.setdefault(one)
            elif one not in roots:
                stack.extend(reversed(one.inputs))

    for member in kernel.members:
        for one in member.inputs:
            visit(one)
    return list(found)


def _is_scalar(members: Sequence[Value], roots: set[Value]) -> bool:
    """Whether an element comes from computed places or the C library: no vectors."""
    pending = [one for member in members for one in (member, *member.inputs)]
    seen: set[Value] = set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in roots and value not in members:
            continue
        if (isinstance(value, Gather) and value.inputs) or (
            isinstance(value, Point) and value.scalar
        ):
            return True
        pending.extend(value.inputs)
    return False


# --- fewer and longer axes -----------------------------------------------------------------------


def _collapsed(kernel: Kernel, roots: set[Value]) -> dict[Value, tuple[int, ...]]:
    """Shapes with adjacent axes made one, where nothing in the kernel tells them apart.

    Empty where views or gathers do, or where ranks differ in a way that broadcasting must see.
    """
    members = kernel.members
    values: set[Value] = set(members)
    pending = list(members)
    while pending:
        value = pending.pop()
        if isinstance(value, View | Gather):
            return {}
        if value in roots and value not in members:
            continue
        for one in value.inputs:
            if one not in values:
                values.add(one)
                pending.append(one)
    domain = kernel.shape
    if any(len(value.shape) > len(domain) for value in values):
        return {}
    padded = {
        value: (1,) * (len(domain) - len(value.shape)) + value.shape
        if not isinstance(value, Reduce) or len(value.shape) == len(domain)
        else None
        for value in values
    }
    if any(shape is None for shape in padded.values()):
        return {}
    patterns = [tuple(shape[axis] == 1 for shape in padded.values()) for axis in range(len(domain))]
    cut = {0, len(kernel.lead)} if kernel.lead else {0}
    starts = [
        axis
        for axis in range(len(domain))
        if axis in cut or (domain[axis] != 1 and _differs(patterns, domain, axis))
    ]
    if not starts:
        return dict.fromkeys(values, ()) if not domain else {}
    if kernel.lead is not None and sum(start < len(kernel.lead) for start in starts) > 1:
        return {}
    ends = [*starts[1:], len(domain)]
    return {
        value: tuple(math.prod(shape[a:b]) for a, b in zip(starts, ends, strict=True))
        for value, shape in padded.items()
    }


def _differs(patterns: Sequence[Any], domain: Sequence[int], axis: int) -> bool:
    """Whether an axis is broadcast otherwise than the last one before it that has elements."""
    for before in range(axis - 1, -1, -1):
        if domain[before] != 1:
            return bool(patterns[before] != patterns[axis])
    return False
