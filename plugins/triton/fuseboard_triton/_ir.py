"""Values of a region: what is read, what is computed from it point by point, what is reduced.

A value has a shape of its own; how the shapes of several lie in one another is worked out when
they are put into one kernel (``_axes``, ``_schedule``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fuseboard_triton._torch_internals import Size

#: dtype → the one in which kernels compute with it. ATen computes with half types in float32.
COMPUTE = {
    torch.float32: "tl.float32",
    torch.float16: "tl.float32",
    torch.bfloat16: "tl.float32",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.bool: "tl.int1",
}
#: dtype → Triton's name of it in memory.
STORED = {
    **COMPUTE,
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
}
HALF = (torch.float16, torch.bfloat16)


class Unsupported(Exception):
    """Something that kernels don't compute; the text is the reason for people."""


@dataclass(eq=False)
class Value:
    """One value.

    :ivar kind: ``buffer`` (in memory before any kernel that reads it runs), ``const``, ``symbol``
        (a size as a number), ``index`` (positions along a dimension), ``view``, ``pointwise``,
        ``reduce``.
    :ivar op: a view's, pointwise op's or reduction's name.
    :ivar compute: a pointwise op's operands are cast to this first; a reduction accumulates in it.
    :ivar param: the number, expression, dimension, permutation, shape or reduced dimensions.
    :ivar meta: the fake tensor that this is, where it is a node's: it says with which strides the
        value lies in memory.
    """

    kind: str
    dtype: torch.dtype
    shape: tuple[Size, ...]
    op: str = ""
    args: tuple[Value, ...] = ()
    compute: torch.dtype | None = None
    param: Any = None
    meta: torch.Tensor | None = field(default=None, repr=False)


def const(number: Any, dtype: torch.dtype, shape: tuple[Size, ...] = ()) -> Value:
    """A number, in each place of a shape."""
    return Value("const", dtype, shape, param=number)


def pointwise(op: str, args: tuple[Value, ...], dtype: torch.dtype, compute: torch.dtype) -> Value:
    """An op on operands whose shapes broadcast."""
    return Value("pointwise", dtype, broadcast([a.shape for a in args]), op, args, compute)


def cast(value: Value, dtype: torch.dtype) -> Value:
    """A value in another dtype, rounded to it."""
    if value.dtype == dtype:
        return value
    return pointwise("cast", (value,), dtype, value.dtype)


def copied(value: Value) -> Value:
    """A value that is computed again rather than a tensor that is handed on."""
    return pointwise("keep", (value,), value.dtype, value.dtype)


def rounded(value: Value) -> Value:
    """A half value as memory would hold it, where what follows jumps: a comparison, a floor."""
    if value.dtype not in HALF or value.kind in ("buffer", "const"):
        return value
    if value.op in ("cast", "neg", "abs", "relu") or value.kind == "view":
        value_of = value.args[0]
        if value.op == "cast" or rounded(value_of) is value_of:
            return value
    return pointwise("cast", (value,), value.dtype, value.dtype)


def reduce(op: str, value: Value, dims: tuple[int, ...], compute: torch.dtype) -> Value:
    """A reduction that keeps the reduced dimensions with size 1."""
    if all(is_one(value.shape[dim]) for dim in dims):
        return pointwise("keep", (value,), compute, compute)
    shape = tuple(1 if dim in dims else size for dim, size in enumerate(value.shape))
    return Value("reduce", compute, shape, op, (value,), compute, tuple(dims))


def view(op: str, value: Value, shape: tuple[Size, ...], param: Any = None) -> Value:
    """``permute``, ``reshape`` or ``expand`` of a value."""
    return Value("view", value.dtype, shape, op, (value,), param=param)


def reshape(value: Value, shape: tuple[Size, ...]) -> Value:
    return value if value.shape == shape else view("reshape", value, shape)


def is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal. No guard is added."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if a == b:
        return True
    import sympy

    return bool(sympy.expand(a - b) == 0)


def broadcast(shapes: list[tuple[Size, ...]]) -> tuple[Size, ...]:
    """The shape that operands have together; torch has checked that they fit."""
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[Size] = [1] * rank
    for shape in shapes:
        for dim, size in enumerate(shape, rank - len(shape)):
            if is_one(result[dim]) and not is_one(size):
                result[dim] = size
    return tuple(result)


def product(sizes: Any) -> Size:
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


def contiguous_strides(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))
