"""Views, and ops that read no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from fuseboard_triton._build import aten, builder, meta_of, prims, shape_of
from fuseboard_triton._elementwise import as_operand
from fuseboard_triton._ir import HALF, Unsupported, Value, cast, const, pointwise, view


@builder(aten.alias.default, aten.detach.default)
def _alias(node: Node, a: Value) -> Value:
    return view("reshape", a, a.shape)


@builder(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.flatten.using_ints,
)
def _reshape(node: Node, a: Value, *others: Any) -> Value:
    return view("reshape", a, shape_of(meta_of(node)))


@builder(aten.expand.default)
def _expand(node: Node, a: Value, *others: Any, **keywords: Any) -> Value:
    return view("expand", a, shape_of(meta_of(node)))


@builder(aten.permute.default)
def _permute(node: Node, a: Value, dims: Sequence[int]) -> Value:
    return permuted(a, [dim % len(a.shape) for dim in dims])


@builder(aten.transpose.int)
def _transpose(node: Node, a: Value, first: int, second: int) -> Value:
    order = list(range(len(a.shape)))
    if order:
        order[first], order[second] = order[second], order[first]
    return permuted(a, order)


@builder(aten.t.default)
def _t(node: Node, a: Value) -> Value:
    return permuted(a, list(reversed(range(len(a.shape)))))


def permuted(value: Value, order: Sequence[int]) -> Value:
    shape = tuple(value.shape[dim] for dim in order)
    return view("permute", value, shape, tuple(order))


# --- what reads no tensor -------------------------------------------------------------------------


def _filled(node: Node, number: Any) -> Value:
    meta = meta_of(node)
    if not isinstance(number, bool | int | float):
        raise Unsupported("filling with what isn't a plain number isn't supported")
    if meta.dtype in HALF:  # as memory would hold it
        number = torch.tensor(number, dtype=meta.dtype).item()
    return const(number, meta.dtype, shape_of(meta))


@builder(aten.full.default, aten.new_full.default)
def _full(node: Node, *args: Any, **keywords: Any) -> Value:
    return _filled(node, args[-1])


@builder(aten.full_like.default)
def _full_like(node: Node, a: Value, number: Any, **keywords: Any) -> Value:
    return _filled(node, number)


@builder(aten.scalar_tensor.default)
def _scalar_tensor(node: Node, number: Any, **keywords: Any) -> Value:
    return _filled(node, number)


@builder(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def _zeros(node: Node, *args: Any, **keywords: Any) -> Value:
    return _filled(node, 0)


@builder(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(node: Node, *args: Any, **keywords: Any) -> Value:
    return _filled(node, 1)


@builder(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(node: Node, *args: Any, **keywords: Any) -> Value:
    meta = meta_of(node)
    start = args[0] if len(args) > 1 else 0
    step = args[2] if len(args) > 2 else 1
    if meta.dtype not in (torch.int32, torch.int64):
        raise Unsupported("ranges of floats aren't supported")
    return _positions(meta, start, step)


@builder(prims.iota.default)
def _iota(node: Node, length: Any, start: Any, step: Any, **keywords: Any) -> Value:
    meta = meta_of(node)
    if meta.dtype not in (torch.int32, torch.int64):
        raise Unsupported("ranges of this dtype aren't supported")
    return _positions(meta, start, step)


def _positions(meta: torch.Tensor, start: Any, step: Any) -> Value:
    dtype = meta.dtype
    result = Value("index", torch.int64, shape_of(meta), param=0)
    for op, number in (("mul", step), ("add", start)):
        if number != (1 if op == "mul" else 0):
            result = pointwise(
                op, (result, as_operand(number, torch.int64)), torch.int64, torch.int64
            )
    return cast(result, dtype)
