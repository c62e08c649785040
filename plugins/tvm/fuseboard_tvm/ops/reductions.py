"""Sums, extremes and their relatives over axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from fuseboard_tvm import _scalar as s
from fuseboard_tvm._values import Reduce, Value, reshape
from fuseboard_tvm.ops.registry import (
    Arguments,
    Op,
    axes_of,
    cast,
    constant,
    dtype_of,
    meta,
    named_arguments,
    point,
    register,
    shape_of,
)


def reduced(how: str, value: Value, axes: Sequence[int], dtype: str | None = None) -> Value:
    """A reduction that keeps its axes, each with one element."""
    dtype = dtype or value.dtype
    axes = tuple(axis for axis in axes if value.shape[axis] != 1)
    if not axes:
        return value
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(value.shape))
    return Reduce(shape, dtype, (value,), 4, how=how, axes=axes)


def _axes(a: Arguments, rank: int) -> tuple[int, ...]:
    return axes_of(a.get("dim"), rank)


def _sum_like(how: str, node: Node, a: Arguments) -> Value:
    dtype = dtype_of(node)
    value = cast(a["self"], dtype)
    return reshape(reduced(how, value, _axes(a, len(value.shape))), shape_of(node))


register("sum sum.dim_IntList", Op(lambda node, a: _sum_like("sum", node, a)))
register("prod prod.dim_int", Op(lambda node, a: _sum_like("prod", node, a)))


def _mean(node: Node, a: Arguments) -> Value:
    value = cast(a["self"], dtype_of(node))
    return reshape(_mean_over(value, _axes(a, len(value.shape))), shape_of(node))


def _mean_over(value: Value, axes: Sequence[int]) -> Value:
    """With the axes kept."""
    dtype, count = value.dtype, math.prod(value.shape[axis] for axis in axes)
    total = reduced("sum", value, axes)
    return point(
        total.shape, dtype, lambda bind, x: s.divide(x, s.const(count, dtype)), total, cost=3
    )


register("mean mean.dim", Op(_mean))


def _extreme(how: str, node: Node, a: Arguments) -> Value:
    value = a["self"]
    result = reduced(how, _ordered(value), _axes(a, len(value.shape)))
    return reshape(cast(result, dtype_of(node)), shape_of(node))


def _ordered(value: Value) -> Value:
    """Booleans as numbers, which have an order."""
    return cast(value, "int32") if value.dtype == "bool" else value


register("amax max", Op(lambda node, a: _extreme("max", node, a)))
register("amin min", Op(lambda node, a: _extreme("min", node, a)))


def _test(how: str, node: Node, a: Arguments) -> Value:
    """``any`` and ``all``: the greatest or least of zeros and ones."""
    value = cast(cast(a["self"], "bool"), "int32")
    result = reduced(how, value, _axes(a, len(value.shape)))
    return reshape(cast(result, dtype_of(node)), shape_of(node))


register("any any.dim any.dims", Op(lambda node, a: _test("max", node, a)))
register("all all.dim all.dims", Op(lambda node, a: _test("min", node, a)))


def _position(how: str, node: Node, a: Arguments) -> Value:
    value = a["self"]
    if a["dim"] is None:
        value = reshape(value, (value.numel,))
        axes: tuple[int, ...] = (0,)
    else:
        axes = axes_of(a["dim"], len(value.shape))
    return reshape(_places(how, value, axes), shape_of(node))


def _places(how: str, value: Value, axes: Sequence[int]) -> Value:
    """Where along an axis the extreme is."""
    if not axes or value.shape[axes[0]] == 1:
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(value.shape))
        return point(shape, "int64", lambda bind: s.const(0, "int64"), cost=0)
    return reduced(how, _ordered(value), axes, "int64")


register("argmax", Op(lambda node, a: _position("argmax", node, a)))
register("argmin", Op(lambda node, a: _position("argmin", node, a)))


def _both(how: str, node: Node, a: Arguments) -> list[Value]:
    """The extreme and where it is."""
    value = a["self"]
    axes = axes_of(a["dim"], len(value.shape))
    values, places = node.meta["val"]
    best = cast(reduced(how, _ordered(value), axes), value.dtype)
    return [
        reshape(best, tuple(values.shape)),
        reshape(_places("arg" + how, value, axes), tuple(places.shape)),
    ]


register("max.dim", Op(lambda node, a: _both("max", node, a)))
register("min.dim", Op(lambda node, a: _both("min", node, a)))


# --- variances -----------------------------------------------------------------------------------


def _spread(value: Value, axes: Sequence[int], correction: Any) -> tuple[Value, Value]:
    """Variance and mean, with the axes kept, in two passes."""
    dtype = value.dtype
    count = math.prod(value.shape[axis] for axis in axes)
    mean = _mean_over(value, axes)

    def square(bind: Any, x: Any, y: Any) -> Any:
        distance = bind(x - y)
        return distance * distance

    squares = reduced("sum", point(value.shape, dtype, square, value, mean, cost=2), axes)
    divisor = max(0.0, count - (1 if correction is None else correction))
    inputs = squares, constant(divisor, dtype)
    variance = point(mean.shape, dtype, lambda bind, x, d: s.divide(x, d), *inputs, cost=3)
    return variance, mean


def _variance(node: Node, a: Arguments) -> Value:
    value = a["self"]
    variance, _ = _spread(value, _axes(a, len(value.shape)), a["correction"])
    return reshape(variance, shape_of(node))


def _variance_and_mean(node: Node, a: Arguments) -> list[Value]:
    value = a["self"]
    found = _spread(value, _axes(a, len(value.shape)), a["correction"])
    shapes = [tuple(one.shape) for one in node.meta["val"]]
    return [reshape(one, shape) for one, shape in zip(found, shapes, strict=True)]


def _of_floats(node: Node) -> str | None:
    own = meta(named_arguments(node)["self"])
    return None if own.is_floating_point() else f"{node.target} of {own.dtype} isn't supported"


register("var.correction", Op(_variance, _of_floats))
register("var_mean.correction", Op(_variance_and_mean, _of_floats))
