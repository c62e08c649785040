"""Matrix products and convolutions as TVM computes them, and the schedules that tuning tries.

A convolution is a product, too: for each offset within the kernel, the input that it reads is one
stretch of memory if rows are padded to equal lengths and, with strides, their columns are sorted by
remainder. So both are ``O[b, f, i] = sum over k of X[b, k, i] * Y[f, k]``, with ``i`` in vectors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx
from tvm.tirx import all as every
from tvm.tirx import floordiv, floormod, if_then_else

from fuseboard_tvm._values import Extern

#: Fewer floating-point operations than this aren't worth a search.
LEAST_FLOPS = 1 << 20
#: Bytes of a vector: one register of AVX-512, two of AVX2.
VECTOR = 64
#: Terms that are summed up before they are added to the rest of a sum.
BLOCK = 256
WIDTHS = {"float32": 4, "float64": 8}
EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52}


@dataclass(frozen=True)
class Operand:
    """A tensor of a call: all of a stored tensor, perhaps with its axes in another order.

    :ivar tensor: its position among the call's tensors.
    :ivar stored: sizes in the order of memory, row-major.
    :ivar axes: for each stored axis, which of the operand's it is.
    """

    tensor: int
    stored: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        return self.axes == tuple(range(len(self.axes)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in sorted(zip(self.axes, self.stored, strict=True)))


@dataclass(frozen=True)
class Workload:
    """What is tuned.

    :ivar title: for people, such as ``mm float32 (64, 256) (256, 96)``.
    :ivar key: says everything about it: op, dtype, sizes, order of axes.
    :ivar function: computes it; unscheduled. Its parameters are ``operands``, then the result.
    :ivar operands: positions among the call's tensors.
    :ivar shapes: as which each of them is read.
    :ivar terms: of the sum that an element is.
    :ivar block: steps of the first summed axis after which a part of the sum is added to the rest,
        which bounds the rounding error as BLAS does.
    :ivar nested: how many summed axes follow the first.
    :ivar packs: an input is copied first; ``line`` is then the length of a padded row of it, or 0.
    :ivar exact: nothing of ``O`` is padding: the result is stored from registers.
    """

    title: str
    key: str
    function: Any
    operands: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    terms: int
    flops: int
    block: int
    nested: int
    packs: bool
    line: int
    exact: bool


@dataclass(frozen=True)
class Tuned:
    """A kernel in place of a call.

    :ivar function: as loops.
    """

    workload: Workload
    function: Any


def workload_of(extern: Extern) -> Workload | None:
    """The workload of a call; None where it isn't tuned."""
    op = extern.spec["op"].split(".")[1]
    make = _MAKERS.get(op)
    result = extern.results[0]
    if make is None or result is None or result[1] not in WIDTHS:
        return None
    workload: Workload | None = make(_Call(op, extern, result[1]))
    return None if workload is None or workload.flops < LEAST_FLOPS else workload


class _Call:
    """The arguments of a call, and the expressions that are made of them."""

    def __init__(self, op: str, extern: Extern, dtype: str) -> None:
        self.op = op
        self.dtype = dtype
        self.args = extern.spec["args"]
        self.kwargs = extern.spec["kwargs"]
        self.inputs = extern.inputs
        self.lanes = VECTOR // WIDTHS[dtype]
        self.operands: list[Operand] = []
        self.placeholders: list[Any] = []

    def operand(self, place: int) -> Operand | None:
        argument = self.args[place]
        base = self.inputs[argument["tensor"]]
        size, stride = argument.get("size", base.shape), argument.get("stride")
        if stride is None:
            return Operand(argument["tensor"], tuple(size), tuple(range(len(size))))
        if argument["offset"] or math.prod(size) != base.numel:
            return None
        axes = tuple(sorted(range(len(size)), key=lambda axis: (-stride[axis], -size[axis])))
        step = 1
        for axis in reversed(axes):
            if size[axis] != 1 and stride[axis] != step:
                return None
            step *= size[axis]
        return Operand(argument["tensor"], tuple(size[axis] for axis in axes), axes)

    def read(self, operand: Operand, stored: Sequence[int] = ()) -> Callable[..., Any]:
        """How an element is read, by the operand's own index.

        :param stored: other sizes of the same memory, which are then those of the index.
        """
        placeholder = te.placeholder(stored or operand.stored, self.dtype, f"X{len(self.operands)}")
        self.operands.append(operand)
        self.placeholders.append(placeholder)
        if stored:
            return lambda *index: placeholder[index]
        return lambda *index: placeholder[tuple(index[axis] for axis in operand.axes)]

    def workload(
        self, result: Any, summed: tuple[int, ...], packs: bool, line: int, exact: bool
    ) -> Workload:
        """The whole; ``summed`` are the sizes of the axes that are summed over."""
        first, *rest = summed
        terms, most = math.prod(summed), max(1, BLOCK // math.prod(rest))
        function = te.create_prim_func([*self.placeholders, result])
        shape = tuple(map(int, result.shape))
        places = [[one.tensor, one.stored, one.axes] for one in self.operands]
        plain = [one for one in self.args if not isinstance(one, dict)]
        key = json.dumps([self.op, self.dtype, shape, places, plain])
        title = " ".join([self.op, self.dtype, *(str(one.shape) for one in self.operands)])
        return Workload(
            title,
            key,
            function.with_attr("global_symbol", "main"),
            tuple(one.tensor for one in self.operands),
            tuple(tuple(map(int, one.shape)) for one in self.placeholders),
            self.dtype,
            terms,
            2 * terms * math.prod(shape),
            max(size for size in range(1, min(first, most) + 1) if first % size == 0),
            len(rest),
            packs,
            line,
            exact,
        )

    def padded(self, size: int) -> int:
        """At least ``size`` elements: whole vectors, as many as tiles of 3 or 4 can share."""
        vectors = -(-size // self.lanes)
        while vectors > 3 and vectors % 3 and vectors % 4:
            vectors += 1
        return vectors * self.lanes


# --- matrix products -----------------------------------------------------------------------------


def _product(call: _Call) -> Workload | None:
    """mm, bmm, and addmm without factors."""
    shift = 1 if call.op == "addmm" else 0
    if shift and any(call.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None
    left, right = call.operand(shift), call.operand(shift + 1)
    bias = call.operand(0) if shift else None
    if left is None or right is None or (shift and bias is None):
        return None
    *batch, rows, terms = left.shape
    columns = right.shape[-1]
    if columns < call.lanes // 2 or 0 in (*batch, rows, terms):
        return None
    a, b = call.read(left), call.read(right)
    return _summed(call, tuple(batch), (rows, terms, columns), a, b, right.in_order, bias)


def _summed(
    call: _Call,
    batch: tuple[int, ...],
    sizes: tuple[int, int, int],
    a: Callable[..., Any],
    b: Callable[..., Any],
    in_order: bool,
    bias: Operand | None,
) -> Workload:
    rows, terms, columns = sizes
    many = batch or (1,)
    wide = call.padded(columns)
    start = (lambda b: (b,)) if batch else (lambda b: ())
    k = te.reduce_axis((0, terms), "k")
    packs = not in_order or wide != columns
    if not packs:

        def read(i: Any, j: Any) -> Any:
            return b(*start(i), k, j)
    else:
        packed = te.compute(
            (*many, terms, wide),
            lambda i, k, j: if_then_else(
                j < columns, b(*start(i), k, j), tirx.const(0, call.dtype)
            ),
            name="P",
        )

        def read(i: Any, j: Any) -> Any:
            return packed[i, k, j]

    summed = te.compute(
        (*many, rows, wide),
        lambda i, f, j: te.sum(a(*start(i), f, k) * read(i, j), axis=k),
        name="O",
    )
    add = _bias(call, bias)

    def element(*at: Any) -> Any:
        value = summed[at if batch else (0, *at)]
        return value if add is None else value + add(*at)

    result = te.compute((*batch, rows, columns), element, name="C")
    return call.workload(result, (terms,), packs, 0, wide == columns)


def _bias(call: _Call, bias: Operand | None) -> Callable[..., Any] | None:
    """addmm's first argument, broadcast."""
    if bias is None:
        return None
    read, sizes = call.read(bias), bias.shape

    def at(*index: Any) -> Any:
        own = index[len(index) - len(sizes) :]
        return read(*(0 if size == 1 else i for i, size in zip(own, sizes, strict=True)))

    return at


# --- convolutions --------------------------------------------------------------------------------


def _convolution(call: _Call) -> Workload | None:
    """Of images, in one group, without dilation."""
    _, _, bias, stride, padding, dilation, transposed, _, groups = call.args
    image, weight = call.operand(0), call.operand(1)
    shift = call.operand(2) if bias is not None else None
    if image is None or weight is None or (bias is not None and shift is None):
        return None
    if len(image.shape) != 4 or transposed or groups != 1 or any(one != 1 for one in dilation):
        return None
    n, channels, height, width = image.shape
    filters, _, kh, kw = weight.shape
    (sh, sw), (ph, pw) = stride, padding
    out_h, out_w = (height + 2 * ph - kh) // sh + 1, (width + 2 * pw - kw) // sw + 1
    line = out_w + (kw - 1) // sw
    size = call.padded(out_h * line)
    whole = size + (kh - 1) // sh * line + (kw - 1) // sw
    plain = (kh, kw, sh, sw, ph, pw) == (1, 1, 1, 1, 0, 0) and size == out_h * line
    rc = te.reduce_axis((0, channels), "c")
    ry, rx = te.reduce_axis((0, kh), "y"), te.reduce_axis((0, kw), "x")
    packs = not (plain and image.in_order)
    if not packs:
        flat = call.read(image, (n, channels, size))

        def read(b: Any, i: Any) -> Any:
            return flat(b, rc, i)
    else:
        x = call.read(image)

        def lined(b: Any, c: Any, top: Any, left: Any, i: Any) -> Any:
            y, z = floordiv(i, line) * sh + top - ph, floormod(i, line) * sw + left - pw
            inside = every(y >= 0, y < height, z >= 0, z < width)
            return if_then_else(inside, x(b, c, y, z), tirx.const(0, call.dtype))

        lines = te.compute((n, channels, min(sh, kh), min(sw, kw), whole), lined, name="P")

        def read(b: Any, i: Any) -> Any:
            step = _quotient(ry, sh) * line + _quotient(rx, sw)
            return lines[b, rc, _remainder(ry, sh), _remainder(rx, sw), i + step]

    w = call.read(weight)
    summed = te.compute(
        (n, filters, size),
        lambda b, f, i: te.sum(read(b, i) * w(f, rc, ry, rx), axis=[rc, ry, rx]),
        name="O",
    )
    add = call.read(shift) if shift is not None else None

    def element(b: Any, f: Any, y: Any, x: Any) -> Any:
        value = summed[b, f, y * line + x]
        return value if add is None else value + add(f)

    result = te.compute((n, filters, out_h, out_w), element, name="C")
    exact = size == out_h * line and line == out_w
    return call.workload(result, (channels, kh, kw), packs, line, exact)


def _quotient(i: Any, by: int) -> Any:
    return i if by == 1 else floordiv(i, by)


def _remainder(i: Any, by: int) -> Any:
    return 0 if by == 1 else floormod(i, by)


_MAKERS = {"mm": _product, "bmm": _product, "addmm": _product, "convolution": _convolution}
