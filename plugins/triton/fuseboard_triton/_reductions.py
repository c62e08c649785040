"""Reductions, and what is made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fuseboard_triton._build import aten, builder, meta_of, shape_of
from fuseboard_triton._elementwise import as_dtype, truth, where
from fuseboard_triton._ir import (
    Unsupported,
    Value,
    cast,
    const,
    pointwise,
    product,
    reshape,
    rounded,
)
from fuseboard_triton._split import reduce


def dims_of(value: Value, dims: Any) -> tuple[int, ...]:
    """Reduced dimensions as numbers from the left; none given means all."""
    rank = len(value.shape)
    if isinstance(dims, int):
        dims = [dims]
    if dims is None or len(dims) == 0:
        return tuple(range(rank))
    return tuple(sorted(dim % rank for dim in dims)) if rank else ()


def count_of(value: Value, dims: tuple[int, ...]) -> Value:
    """The number of elements that a reduction takes in, as a float."""
    count = product(value.shape[dim] for dim in dims)
    if isinstance(count, int):
        return const(float(count), torch.float32)
    return cast(Value("symbol", torch.int64, (), param=count), torch.float32)


def total(value: Value, dims: tuple[int, ...], compute: torch.dtype = torch.float32) -> Value:
    """A sum that keeps the reduced dimensions."""
    return reduce("sum", value, dims, compute)


def mean_of(value: Value, dims: tuple[int, ...]) -> Value:
    sums = total(value, dims)
    return pointwise("div", (sums, count_of(value, dims)), torch.float32, torch.float32)


def shaped(value: Value, meta: torch.Tensor) -> Value:
    """A reduction's result with the shape that ATen gives it."""
    return reshape(value, shape_of(meta))


@builder(aten.sum.default, aten.sum.dim_IntList)
def _sum(node: Node, a: Value, dims: Any = None, keepdim: bool = False, **keywords: Any) -> Value:
    meta = meta_of(node)
    compute = torch.float32 if meta.dtype.is_floating_point else meta.dtype
    if a.dtype == torch.bool:
        a = cast(a, torch.int64)
    result = total(a, dims_of(a, dims), compute)
    return shaped(as_dtype(result, meta.dtype), meta)


@builder(aten.mean.default, aten.mean.dim)
def _mean(node: Node, a: Value, dims: Any = None, keepdim: bool = False, **keywords: Any) -> Value:
    meta = meta_of(node)
    return shaped(as_dtype(mean_of(a, dims_of(a, dims)), meta.dtype), meta)


def extreme(op: str, value: Value, dims: tuple[int, ...]) -> Value:
    """The largest (``max``) or smallest (``min``), NaN where there is one."""
    if value.dtype == torch.bool:
        raise Unsupported("the largest of booleans isn't supported")
    result = reduce(op, value, dims, value.dtype)
    return result


@builder(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def _extreme(node: Node, a: Value, dims: Any = None, keepdim: bool = False) -> Value:
    op = "max" if node.target in (aten.amax.default, aten.max.default) else "min"
    return shaped(extreme(op, a, dims_of(a, dims)), meta_of(node))


def position_of(op: str, value: Value, dims: tuple[int, ...]) -> tuple[Value, Value]:
    """The extreme along dimensions, and the first flat position of it, or of NaN."""
    value = rounded(value)
    best = extreme(op, value, dims)
    if len(dims) > 1 or len(value.shape) == 0:
        flat = reshape(value, (product(value.shape),))
        place = Value("index", torch.int64, flat.shape, param=0)
        source, found, along = flat, reshape(best, (1,)), (0,)
    else:
        place = Value("index", torch.int64, value.shape, param=dims[0])
        source, found, along = value, best, dims
    hit = pointwise("eq", (source, found), torch.bool, value.dtype)
    if value.dtype.is_floating_point:
        spoilt = [pointwise("isnan", (v,), torch.bool, value.dtype) for v in (source, found)]
        both = pointwise("and", tuple(spoilt), torch.bool, torch.bool)
        hit = pointwise("or", (hit, both), torch.bool, torch.bool)
    nowhere = const(2**62, torch.int64)
    first = reduce("min", where(hit, place, nowhere, torch.int64), along, torch.int64)
    return best, first


@builder(aten.max.dim, aten.min.dim)
def _with_indices(node: Node, a: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    op = "max" if node.target == aten.max.dim else "min"
    metas = node.meta["val"]
    if not a.shape:
        raise Unsupported("the largest of one number isn't supported")
    best, first = position_of(op, a, dims_of(a, dim))
    return shaped(best, metas[0]), shaped(first, metas[1])


@builder(aten.argmax.default, aten.argmin.default)
def _argmax(node: Node, a: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    op = "max" if node.target == aten.argmax.default else "min"
    _, first = position_of(op, a, dims_of(a, dim))
    return shaped(first, meta_of(node))


@builder(aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim)
def _any(node: Node, a: Value, dims: Any = None, keepdim: bool = False) -> Value:
    op = "max" if "any" in str(node.target) else "min"
    flags = cast(truth(a), torch.int32)
    result = reduce(op, flags, dims_of(a, dims), torch.int32)
    # Of nothing, the largest is the least number there is and the smallest the greatest.
    positive = pointwise("gt", (result, const(0, torch.int32)), torch.bool, torch.int32)
    return shaped(positive, meta_of(node))


def variance(value: Value, dims: tuple[int, ...], correction: float = 0.0) -> tuple[Value, Value]:
    """Variance and mean, in two passes: the mean is subtracted before squaring."""
    f32 = torch.float32
    mean = mean_of(value, dims)
    centred = pointwise("sub", (value, mean), f32, f32)
    squares = total(pointwise("mul", (centred, centred), f32, f32), dims)
    count = count_of(value, dims)
    if correction:
        less = pointwise("sub", (count, const(float(correction), f32)), f32, f32)
        count = pointwise("maximum", (less, const(0.0, f32)), f32, f32)
    return pointwise("div", (squares, count), f32, f32), mean


@builder(aten.var_mean.correction, aten.var.correction)
def _var(node: Node, a: Value, dims: Any = None, *, correction: Any = 1, keepdim: bool = False):
    correction = 1 if correction is None else correction
    both = variance(a, dims_of(a, dims), correction)
    if node.target == aten.var_mean.correction:
        metas = node.meta["val"]
        return tuple(shaped(as_dtype(v, m.dtype), m) for v, m in zip(both, metas, strict=True))
    meta = meta_of(node)
    return shaped(as_dtype(both[0], meta.dtype), meta)
