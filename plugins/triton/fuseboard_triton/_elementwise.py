"""Pointwise ops: promoted and rounded where ATen does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from fuseboard_triton._build import aten, builder, meta_of, prims
from fuseboard_triton._ir import (
    COMPUTE,
    Unsupported,
    Value,
    cast,
    const,
    copied,
    pointwise,
    rounded,
)
from fuseboard_triton._pointwise import DEFAULT, JUMPS, ROUNDING, SIMPLE, TO_BOOL, TO_FLOAT
from fuseboard_triton._torch_internals import computation_dtype


def as_operand(given: Any, dtype: torch.dtype) -> Value:
    """An operand as a value: numbers take the dtype in which the op computes."""
    if isinstance(given, Value):
        return given
    if isinstance(given, bool | int | float):
        return const(given, dtype)
    raise Unsupported(f"an operand of type {type(given).__name__} isn't supported")


def _example(given: Any) -> Any:
    """An operand as torch's promotion sees it."""
    if isinstance(given, Value) and given.kind == "symbol":
        return 1
    if isinstance(given, Value):
        # Only the dtype and whether there are dimensions matter.
        return torch.empty([1] * len(given.shape), dtype=given.dtype, device="meta")
    return given


def elementwise(node: Node, op: str, operands: Sequence[Any], kind: str = DEFAULT) -> Value:
    """A pointwise op under ATen's promotion."""
    examples = [_example(operand) for operand in operands]
    # A comparison's own result is boolean; its operands are promoted as those of a sum are.
    compute = computation_dtype(examples, DEFAULT if kind == TO_BOOL else kind)
    if compute not in COMPUTE:
        raise Unsupported(f"computing in {compute} isn't supported")
    values = tuple(as_operand(operand, compute) for operand in operands)
    if op in JUMPS:
        values = tuple(rounded(value) for value in values)
    if compute == torch.bool:
        op = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and", "invert": "not"}.get(
            op, op
        )
        if op in ("neg", "sub", "abs", "sign", "relu"):
            raise Unsupported(f"{op} of booleans isn't supported")
    dtype = torch.bool if kind == TO_BOOL else compute
    return pointwise(op, values, dtype, compute)


@builder(*SIMPLE)
def _simple(node: Node, *operands: Any, **keywords: Any) -> Value:
    if keywords:
        raise Unsupported(f"keyword arguments aren't supported: {', '.join(sorted(keywords))}")
    meta_of(node)
    op, kind = SIMPLE[node.target]
    return elementwise(node, op, operands, kind)


@builder(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)
def _add(node: Node, a: Any, b: Any, alpha: Any = 1) -> Value:
    meta_of(node)
    op = "add" if node.target in (aten.add.Tensor, aten.add.Scalar) else "sub"
    compute = computation_dtype([_example(a), _example(b)], DEFAULT)
    if alpha != 1:
        if not isinstance(alpha, int | float):
            raise Unsupported("alpha is a size")
        b = pointwise("mul", (as_operand(b, compute), const(alpha, compute)), compute, compute)
    return elementwise(node, op, (a, b))


@builder(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default)
def _logical(node: Node, a: Value, b: Value) -> Value:
    op = str(node.target).split("_")[1].split(".")[0]
    truths = tuple(truth(value) for value in (a, b))
    return pointwise(op, truths, torch.bool, torch.bool)


def truth(value: Value) -> Value:
    """Whether a value isn't zero."""
    if value.dtype == torch.bool:
        return value
    value = rounded(value)
    return pointwise("ne", (value, const(0, value.dtype)), torch.bool, value.dtype)


@builder(aten.bitwise_not.default)
def _invert(node: Node, a: Value) -> Value:
    return elementwise(node, "invert", (a,))


@builder(*ROUNDING)
def _rounding(node: Node, a: Value) -> Value:
    if not a.dtype.is_floating_point:
        return copied(a)
    return elementwise(node, ROUNDING[node.target], (a,))


@builder(aten.reciprocal.default)
def _reciprocal(node: Node, a: Value) -> Value:
    return elementwise(node, "div", (1.0, a), TO_FLOAT)


@builder(aten.sigmoid.default)
def _sigmoid(node: Node, a: Value) -> Value:
    power = elementwise(node, "exp", [elementwise(node, "neg", [a], TO_FLOAT)], TO_FLOAT)
    return elementwise(node, "div", [1.0, elementwise(node, "add", [power, 1.0])], TO_FLOAT)


@builder(aten.square.default)
def _square(node: Node, a: Value) -> Value:
    return elementwise(node, "mul", (a, a))


@builder(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(node: Node, condition: Value, a: Any, b: Any) -> Value:
    dtype = meta_of(node).dtype
    return where(truth(condition), as_operand(a, dtype), as_operand(b, dtype), dtype)


def where(condition: Value, a: Value, b: Value, dtype: torch.dtype) -> Value:
    return pointwise("where", (condition, a, b), dtype, dtype)


@builder(aten.clamp.default, aten.clamp.Tensor)
def _clamp(node: Node, a: Value, low: Any = None, high: Any = None) -> Value:
    bounds = [bound for bound in (low, high) if bound is not None]
    dtype = meta_of(node).dtype
    result = cast(a, dtype) if a.dtype != dtype else a
    for op, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            result = pointwise(op, (result, as_operand(bound, dtype)), dtype, dtype)
    return result if bounds else copied(a)


@builder(aten.pow.Tensor_Scalar)
def _pow(node: Node, a: Value, exponent: Any) -> Value:
    dtype = meta_of(node).dtype
    if not isinstance(exponent, int | float) or isinstance(exponent, bool):
        raise Unsupported("an exponent that is a size isn't supported")
    if a.dtype == torch.bool or (not dtype.is_floating_point and exponent not in (1, 2, 3)):
        raise Unsupported("powers of integers other than 1, 2, 3 aren't supported")

    def times(x: Value, y: Value) -> Value:
        return pointwise("mul", (x, y), dtype, dtype)

    one = const(1, dtype)
    if exponent == 2:
        return times(a, a)
    if exponent == 3:
        return times(times(a, a), a)
    if exponent == 1:
        return pointwise("keep", (a,), dtype, dtype)
    if exponent == 0.5:
        return pointwise("sqrt", (a,), dtype, dtype)
    if exponent == -0.5:
        return pointwise("rsqrt", (a,), dtype, dtype)
    if exponent == -1:
        return pointwise("div", (one, a), dtype, dtype)
    if exponent == -2:
        return pointwise("div", (one, times(a, a)), dtype, dtype)
    return pointwise("pow", (a, const(float(exponent), dtype)), dtype, dtype)


@builder(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _general_pow(node: Node, a: Any, b: Any) -> Value:
    if not meta_of(node).dtype.is_floating_point:
        raise Unsupported("powers of integers with a tensor as exponent aren't supported")
    return elementwise(node, "pow", (a, b))


@builder(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _divide(node: Node, a: Any, b: Any, *, rounding_mode: str | None) -> Value:
    if rounding_mode is None:
        return elementwise(node, "div", (a, b), TO_FLOAT)
    if not meta_of(node).dtype.is_floating_point:
        op = "div_int" if rounding_mode == "trunc" else "floor_divide_int"
        return elementwise(node, op, (a, b))
    if rounding_mode == "trunc":
        quotient = elementwise(node, "div", (a, b))
        return pointwise("trunc", (quotient,), quotient.dtype, quotient.dtype)
    return _floor_divide(node, a, b)


def _floor_divide(node: Node, a: Any, b: Any) -> Value:
    """``div_floor_floating`` of ``c10/util/generic_math.h``: exact where ``floor(a / b)`` isn't."""
    dtype = meta_of(node).dtype
    x, y = (rounded(as_operand(operand, dtype)) for operand in (a, b))

    def op(name: str, *operands: Any) -> Value:
        kind = torch.bool if name in ("ne", "lt", "gt", "eq", "and", "xor") else torch.float32
        compute = torch.bool if name in ("and", "xor") else torch.float32
        return pointwise(name, tuple(as_operand(o, torch.float32) for o in operands), kind, compute)

    def choose(condition: Value, yes: Any, no: Any) -> Value:
        yes, no = (as_operand(o, torch.float32) for o in (yes, no))
        return where(condition, yes, no, torch.float32)

    rest = op("fmod", x, y)
    quotient = op("div", op("sub", x, rest), y)
    below = op("and", op("ne", rest, 0.0), op("xor", op("lt", y, 0.0), op("lt", rest, 0.0)))
    quotient = choose(below, op("sub", quotient, 1.0), quotient)
    down = op("floor", quotient)
    near = choose(op("gt", op("sub", quotient, down), 0.5), op("add", down, 1.0), down)
    # The sign of a zero quotient is that of a / b.
    zero = op("mul", op("div", x, y), 0.0)
    result = choose(op("ne", quotient, 0.0), near, zero)
    result = choose(op("eq", y, 0.0), op("div", x, y), result)
    return as_dtype(result, dtype)


@builder(aten.remainder.Tensor, aten.remainder.Scalar)
def _remainder(node: Node, a: Any, b: Any) -> Value:
    dtype = meta_of(node).dtype
    if not dtype.is_floating_point:
        return elementwise(node, "remainder_int", (a, b))
    x, y = (rounded(as_operand(operand, dtype)) for operand in (a, b))
    rest = pointwise("fmod", (x, y), torch.float32, torch.float32)
    zero = const(0.0, torch.float32)
    signs = [pointwise("lt", (v, zero), torch.bool, torch.float32) for v in (y, rest)]
    differ = pointwise("xor", tuple(signs), torch.bool, torch.bool)
    some = pointwise("ne", (rest, zero), torch.bool, torch.float32)
    moved = pointwise("add", (rest, y), torch.float32, torch.float32)
    both = pointwise("and", (some, differ), torch.bool, torch.bool)
    return as_dtype(where(both, moved, rest, torch.float32), dtype)


@builder(aten.fmod.Tensor, aten.fmod.Scalar)
def _fmod(node: Node, a: Any, b: Any) -> Value:
    if not meta_of(node).dtype.is_floating_point:
        raise Unsupported("fmod of integers isn't supported")
    return elementwise(node, "fmod", (a, b))


def as_dtype(value: Value, dtype: torch.dtype) -> Value:
    """A float32 value as an op's result: the next op in the kernel reads it unrounded."""
    if value.dtype == dtype:
        return value
    return pointwise("keep", (value,), dtype, torch.float32)


@builder(aten._to_copy.default, prims.convert_element_type.default)
def _to_copy(node: Node, a: Value, *others: Any, **keywords: Any) -> Value:
    meta = meta_of(node)
    source = node.args[0].meta["val"]  # type: ignore[union-attr]
    if source.device != meta.device:
        raise Unsupported("copies between devices aren't supported")
    if a.dtype == meta.dtype:
        return copied(a)
    if meta.dtype == torch.bool:
        return truth(a)
    return cast(rounded(a), meta.dtype)


@builder(aten.clone.default, aten.lift_fresh_copy.default)
def _clone(node: Node, a: Value, **keywords: Any) -> Value:
    return copied(a)
