"""What a region computes, before it is cut into kernels: values and how each comes about.

A value has a static shape and a dtype; its layout in memory, where it gets any, is row-major.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Expr = Any
Index = tuple[Expr, ...]


@dataclass(eq=False)
class Value:
    """One tensor.

    :ivar dtype: in TVM's words, such as ``float32``.
    :ivar inputs: what it is computed from; those of a point broadcast to its shape.
    :ivar cost: about how many instructions one element takes.
    """

    shape: tuple[int, ...]
    dtype: str
    inputs: tuple[Value, ...] = ()
    cost: int = 1

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(eq=False)
class Input(Value):
    """What the region is given; ``position`` among its tensors."""

    position: int = 0


@dataclass(eq=False)
class Point(Value):
    """Element by element. ``compute(bind, *elements)`` gives an element.

    :ivar scalar: it calls the C library, one element at a time.
    """

    compute: Callable[..., Expr] = field(default=lambda: None)
    scalar: bool = False


@dataclass(eq=False)
class Gather(Value):
    """Elements from fixed places. ``compute(load, index)`` gives an element, where
    ``load(number, index)`` is one of an input. Every load is made, so each must be within bounds.
    """

    compute: Callable[..., Expr] = field(default=lambda: None)


@dataclass(eq=False)
class View(Value):
    """One input in another shape or order. ``index(index)`` is where an element comes from.

    :ivar keeps: how many leading axes are the input's own, in place.
    :ivar reshapes: same elements in the same row-major order.
    :ivar strided: the same view of a torch tensor, which raises where that can't be a view; None
        where it never is one.
    """

    index: Callable[[Index], Index] = field(default=lambda index: index)
    keeps: int = 0
    reshapes: bool = False
    strided: Callable[[Any], Any] | None = None


@dataclass(eq=False)
class Reduce(Value):
    """Over ``axes`` of its input, each of which is left with size 1.

    :ivar how: ``sum``, ``prod``, ``max``, ``min``, ``argmax`` or ``argmin`` (``int64`` positions
        along the one axis).
    """

    how: str = "sum"
    axes: tuple[int, ...] = ()


@dataclass(eq=False)
class Extern(Value):
    """A call of one of torch's own operators. Its results are read through :class:`Item`.

    :ivar spec: op and arguments as :mod:`fuseboard_tvm._externs` reads them.
    :ivar results: shape and dtype of each result; None for one that isn't computed.
    """

    spec: dict[str, Any] = field(default_factory=dict)
    results: tuple[tuple[tuple[int, ...], str] | None, ...] = ()


@dataclass(eq=False)
class Item(Value):
    """One result of an :class:`Extern`."""

    number: int = 0


# --- making values -------------------------------------------------------------------------------


def broadcast_index(index: Index, shape: Sequence[int], zero: Expr) -> Index:
    """Where an element of a broadcast tensor lies in the tensor of this shape."""
    if not shape:
        return ()
    own = index[len(index) - len(shape) :]
    return tuple(zero if size == 1 else i for i, size in zip(own, shape, strict=True))


def reshape(value: Value, shape: Sequence[int]) -> Value:
    """The same elements in row-major order; one after another become one."""
    shape = tuple(shape)
    while isinstance(value, View) and value.reshapes:
        value = value.inputs[0]
    if value.shape == shape:
        return value
    old = value.shape

    def index(where: Index) -> Index:
        return unravel(ravel(where, shape), old)

    keeps = 0
    for mine, its in zip(shape, old, strict=False):
        if mine != its:
            break
        keeps += 1

    def partly(where: Index) -> Index:
        rest = unravel(ravel(where[keeps:], shape[keeps:]), old[keeps:])
        return (*where[:keeps], *rest)

    return View(
        shape,
        value.dtype,
        (value,),
        0,
        index=partly if keeps else index,
        keeps=keeps,
        reshapes=True,
        strided=lambda tensor: tensor.view(shape),
    )


def permute(value: Value, order: Sequence[int]) -> Value:
    """Axes in another order."""
    order = tuple(order)
    if order == tuple(range(len(order))):
        return value
    if isinstance(value, View) and isinstance(value.index, _Permuted):
        return permute(value.inputs[0], [value.index.order[axis] for axis in order])
    shape = tuple(value.shape[axis] for axis in order)
    moved = [axis for axis in order if value.shape[axis] != 1]
    if moved == sorted(moved):  # only axes of one element have moved
        return reshape(value, shape)
    keeps = next(number for number, axis in enumerate(order) if number != axis)
    return View(
        shape,
        value.dtype,
        (value,),
        0,
        index=_Permuted(order),
        keeps=keeps,
        strided=lambda tensor: tensor.permute(order),
    )


@dataclass(frozen=True)
class _Permuted:
    order: tuple[int, ...]

    def __call__(self, where: Index) -> Index:
        old: list[Expr] = [None] * len(self.order)
        for axis, i in zip(self.order, where, strict=True):
            old[axis] = i
        return tuple(old)


def expand(value: Value, shape: Sequence[int]) -> Value:
    """Broadcast to a shape."""
    shape = tuple(shape)
    if shape == value.shape:
        return value
    old = value.shape
    keeps = 0
    if len(old) == len(shape):
        while keeps < len(old) and old[keeps] == shape[keeps]:
            keeps += 1

    def index(where: Index) -> Index:
        return broadcast_index(where, old, zero())

    return View(
        shape,
        value.dtype,
        (value,),
        0,
        index=index,
        keeps=keeps,
        strided=lambda tensor: tensor.expand(shape),
    )


def narrow(value: Value, axis: int, start: int, step: int, size: int) -> Value:
    """``size`` elements of an axis, every ``step``-th one."""
    shape = (*value.shape[:axis], size, *value.shape[axis + 1 :])
    if shape == value.shape and start == 0 and step == 1:
        return value

    def index(where: Index) -> Index:
        moved = where[axis] * number(step) + number(start)
        return (*where[:axis], moved, *where[axis + 1 :])

    part = (slice(None),) * axis + (slice(start, start + (size - 1) * step + 1, step),)
    return View(shape, value.dtype, (value,), 0, index=index, keeps=axis, strided=lambda t: t[part])


# --- numbers in indices --------------------------------------------------------------------------


def number(value: int) -> Expr:
    """A constant of an index."""
    from tvm import tirx

    return tirx.const(value, "int64")


_zero: list[Expr] = []


def zero() -> Expr:
    """The index 0, always the same object."""
    if not _zero:
        _zero.append(number(0))
    return _zero[0]


def ravel(where: Index, shape: Sequence[int]) -> Expr:
    """The row-major position of an index."""
    total: Expr = None
    stride = 1
    for i, size in reversed(list(zip(where, shape, strict=True))):
        if size != 1:
            part = i if stride == 1 else i * number(stride)
            total = part if total is None else part + total
        stride *= size
    return zero() if total is None else total


def unravel(position: Expr, shape: Sequence[int]) -> Index:
    """The index at a row-major position."""
    from tvm import tirx

    result: list[Expr] = []
    stride = 1
    total = math.prod(shape)
    for size in reversed(shape):
        if size == 1:
            result.append(zero())
        else:
            part = position if stride == 1 else tirx.floordiv(position, number(stride))
            last = stride * size == total
            result.append(part if last else tirx.floormod(part, number(size)))
            stride *= size
    return tuple(reversed(result))
