"""Element by element, of two operands: arithmetic, comparisons, logic, whole numbers, powers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from tvm import tirx

from fuseboard_tvm import _scalar as s
from fuseboard_tvm._values import Value
from fuseboard_tvm.ops.promotion import (
    FLOATS,
    Compute,
    as_value,
    common_dtype,
    float_only,
    library,
    promoting,
    simple,
)
from fuseboard_tvm.ops.registry import (
    Arguments,
    Op,
    dtype_of,
    named_arguments,
    point,
    register,
    shape_of,
)

# --- of two --------------------------------------------------------------------------------------


def _sum_of(sign: int, swap: bool) -> Callable[[Node, Arguments], Value]:
    """``self + alpha * other``, and its relatives."""

    def emit(node: Node, a: Arguments) -> Value:
        dtype = common_dtype(node, ["self", "other"], "DEFAULT")
        alpha = a.get("alpha", 1)
        left, right = as_value(a["self"], dtype), as_value(a["other"], dtype)
        if swap:
            left, right = right, left
        op = s.add if sign > 0 else s.sub
        result = dtype_of(node)

        def element(bind: Any, x: Any, y: Any) -> Any:
            if dtype == "bool":
                return s.cast(tirx.Or(x, y), result)
            if alpha != 1:
                y = s.mul(y, s.const(alpha, dtype))
            return s.cast(op(x, y), result)

        return point(shape_of(node), result, element, left, right)

    return emit


def _bool_sum(node: Node) -> str | None:
    """Of booleans only a plain sum."""
    given = named_arguments(node)
    own = node.meta["val"].dtype
    if own == torch.bool and given.get("alpha", 1) != 1:
        return "a sum of booleans with alpha isn't supported"
    return None


register("add.Tensor add.Scalar", Op(_sum_of(1, False), _bool_sum))
register("sub.Tensor sub.Scalar", Op(_sum_of(-1, False), _bool_sum))
register("rsub.Scalar", Op(_sum_of(-1, True), _bool_sum))


def _product(bind: Any, x: Any, y: Any) -> Any:
    return tirx.And(x, y) if s.dtype_of(x) == "bool" else s.mul(x, y)


promoting("mul.Tensor mul.Scalar", "self other", _product)
promoting("div.Tensor div.Scalar", "self other", simple(s.divide), "INT_TO_FLOAT", cost=3)
promoting("atan2", "self other", library("atan2"), "INT_TO_FLOAT", cost=60, in_library=FLOATS)
promoting("hypot", "self other", library("hypot"), cost=20, why_not=float_only, in_library=FLOATS)
promoting(
    "copysign.Tensor",
    "self other",
    library("copysign"),
    "INT_TO_FLOAT",
    in_library=FLOATS,
)


def _or_bool(compute: Compute, of_bools: Compute) -> Compute:
    """One form for numbers and one for booleans."""
    return lambda bind, *xs: (of_bools if s.dtype_of(xs[0]) == "bool" else compute)(bind, *xs)


_either, _both = simple(tirx.Or), simple(tirx.And)
promoting("maximum", "self other", _or_bool(simple(s.maximum), _either))
promoting("minimum", "self other", _or_bool(simple(s.minimum), _both))
promoting("fmax", "self other", _or_bool(simple(s.fmax), _either))
promoting("fmin", "self other", _or_bool(simple(s.fmin), _both))


_COMPARISONS: dict[str, Compute] = {
    "eq": simple(s.equal),
    "ne": simple(s.not_equal),
    "lt": simple(tirx.LT),
    "le": simple(lambda x, y: tirx.Or(x < y, s.equal(x, y))),
    "gt": simple(tirx.GT),
    "ge": simple(lambda x, y: tirx.Or(x > y, s.equal(x, y))),
}


def _of_numbers(compute: Compute) -> Compute:
    """Booleans are compared as 0 and 1."""

    def apply(bind: Any, x: Any, y: Any) -> Any:
        if s.dtype_of(x) == "bool":
            x, y = s.cast(x, "int32"), s.cast(y, "int32")
        return compute(bind, x, y)

    return apply


for _name, _compare in _COMPARISONS.items():
    promoting(f"{_name}.Tensor {_name}.Scalar", "self other", _of_numbers(_compare))


def _logical(compute: Compute) -> Compute:
    return lambda bind, x, y: compute(bind, s.cast(x, "bool"), s.cast(y, "bool"))


_exclusive = simple(s.exclusive)

promoting("logical_and", "self other", _logical(_both), "ALWAYS_BOOL")
promoting("logical_or", "self other", _logical(_either), "ALWAYS_BOOL")
promoting("logical_xor", "self other", _logical(_exclusive), "ALWAYS_BOOL")
for _name, _bools, _bits in (
    ("and", _both, simple(tirx.bitwise_and)),
    ("or", _either, simple(tirx.bitwise_or)),
    ("xor", _exclusive, simple(tirx.bitwise_xor)),
):
    promoting(
        f"bitwise_{_name}.Tensor bitwise_{_name}.Scalar", "self other", _or_bool(_bits, _bools)
    )


# --- whole numbers: only by a positive constant, since a zero would end the process ---------------


def _whole_by_constant(node: Node) -> str | None:
    own = node.meta["val"]
    if own.is_floating_point():
        return None
    other = named_arguments(node)["other"]
    if type(other) is int and other > 0 and own.dtype in (torch.int32, torch.int64):
        return None
    return "integers are divided by positive constants only"


def _whole_or(of_floats: Compute, of_integers: Compute) -> Compute:
    return lambda bind, x, y: (of_floats if s.dtype_of(x) in s.FLOATS else of_integers)(bind, x, y)


def _rounded_division(node: Node, a: Arguments) -> Value:
    mode = a["rounding_mode"]
    kind = "INT_TO_FLOAT" if mode is None else "DEFAULT"
    dtype = common_dtype(node, ["self", "other"], kind)
    floats = {
        None: s.divide,
        "floor": s.floor_divide,
        "trunc": lambda x, y: s.trunc(s.divide(x, y)),
    }[mode]
    whole = {None: s.divide, "floor": tirx.floordiv, "trunc": tirx.truncdiv}[mode]
    compute = floats if dtype in s.FLOATS else whole
    values = as_value(a["self"], dtype), as_value(a["other"], dtype)
    result = dtype_of(node)

    def element(bind: Any, x: Any, y: Any) -> Any:
        return s.cast(bind(compute(x, y)), result)

    scalar = mode == "floor" and dtype in s.FLOATS
    return point(shape_of(node), result, element, *values, cost=20, scalar=scalar)


register("div.Tensor_mode", Op(_rounded_division, _whole_by_constant))
for _name, _of_floats, _of_integers in (
    ("floor_divide", s.floor_divide, tirx.floordiv),
    ("fmod.Tensor fmod.Scalar", s.fmod, tirx.truncmod),
    ("remainder.Tensor remainder.Scalar", s.remainder, tirx.floormod),
):
    promoting(
        _name,
        "self other",
        _whole_or(simple(_of_floats), simple(_of_integers)),
        cost=20,
        why_not=_whole_by_constant,
        in_library=FLOATS,
    )


def _shift_by_constant(node: Node) -> str | None:
    other = named_arguments(node)["other"]
    own = node.meta["val"].dtype
    if own in (torch.int32, torch.int64) and type(other) is int and 0 <= other < 31:
        return None
    return "integers are shifted by small constants only"


for _name, _shift in (
    ("bitwise_left_shift.Tensor_Scalar __lshift__.Scalar", tirx.shift_left),
    ("bitwise_right_shift.Tensor_Scalar __rshift__.Scalar", tirx.shift_right),
):
    promoting(_name, "self other", simple(_shift), why_not=_shift_by_constant)


# --- powers --------------------------------------------------------------------------------------

#: Exponents that ATen has kernels of their own for (``aten/src/ATen/native/cpu/PowKernel.cpp``).
_POWERS: dict[float, Callable[[Any], Any]] = {
    0.5: s.sqrt,
    -0.5: lambda x: s.reciprocal(s.sqrt(x)),
    -1.0: s.reciprocal,
    -2.0: lambda x: s.reciprocal(s.mul(x, x)),
}
_WHOLE_POWERS: dict[int, Callable[[Any], Any]] = {
    1: lambda x: x,
    2: lambda x: s.mul(x, x),
    3: lambda x: s.mul(s.mul(x, x), x),
}


def _power(node: Node, a: Arguments) -> Value:
    dtype = common_dtype(node, ["self", "exponent"], "BOOL_TO_LONG")
    base, exponent = as_value(a["self"], dtype), a["exponent"]
    result = dtype_of(node)
    compute = None
    if not isinstance(exponent, Value):
        compute = _WHOLE_POWERS.get(exponent)
        if compute is None and dtype in s.FLOATS:
            compute = _POWERS.get(exponent)
    if compute is not None:
        known = compute
        return point(shape_of(node), result, lambda bind, x: s.cast(known(x), result), base, cost=4)

    def element(bind: Any, x: Any, y: Any) -> Any:
        return s.cast(s.libm("pow", x, y), result)

    return point(
        shape_of(node), result, element, base, as_value(exponent, dtype), cost=80, scalar=True
    )


def _integer_power(node: Node) -> str | None:
    if node.meta["val"].is_floating_point():
        return None
    exponent = named_arguments(node)["exponent"]
    if not isinstance(exponent, Node) and exponent in _WHOLE_POWERS:
        return None
    return "integers are raised to 1, 2 and 3 only"


register("pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar", Op(_power, _integer_power))
