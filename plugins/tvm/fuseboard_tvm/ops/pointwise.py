"""Element by element: arithmetic, comparisons, functions, conversions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from tvm import tirx

from fuseboard_tvm import _exponentials as exponentials
from fuseboard_tvm import _scalar as s
from fuseboard_tvm import _torch_internals
from fuseboard_tvm._values import Value
from fuseboard_tvm.ops.registry import (
    DTYPES,
    Arguments,
    Op,
    cast,
    constant,
    dtype_of,
    emitter,
    meta,
    named_arguments,
    point,
    register,
    shape_of,
)

Compute = Callable[..., Any]


def _operands(node: Node, names: list[str]) -> list[Any]:
    given = named_arguments(node)
    return [given[name] for name in names if given[name] is not None]


def _common(node: Node, names: list[str], kind: str) -> str:
    found = [meta(one) for one in _operands(node, names)]
    return DTYPES[_torch_internals.promoted(found, kind)]


def _plain(
    names: str,
    operands: str,
    compute: Compute,
    kind: str = "DEFAULT",
    cost: int = 1,
    why_not: Callable[[Node], str | None] | None = None,
    library: str = "",
) -> None:
    """Ops that promote their operands to one dtype and compute in it.

    :param library: the dtypes for which ``compute`` calls the C library.
    """
    wanted = operands.split()

    def emit(node: Node, a: Arguments) -> Value:
        dtype = _common(node, wanted, kind)
        values = [_as(a[name], dtype) for name in wanted]
        result = dtype_of(node)

        def element(bind: Any, *elements: Any) -> Any:
            return s.cast(compute(bind, *elements), result)

        scalar = dtype in library.split()
        return point(shape_of(node), result, element, *values, cost=cost, scalar=scalar)

    def complain(node: Node) -> str | None:
        try:
            _common(node, wanted, kind)
        except KeyError as error:
            return f"it computes in {error.args[0]}"
        return why_not(node) if why_not is not None else None

    register(names, Op(emit, complain))


def _as(value: Any, dtype: str) -> Value:
    return cast(value, dtype) if isinstance(value, Value) else constant(value, dtype)


def _float_only(node: Node) -> str | None:
    """For ops whose integer form isn't written."""
    if any(
        isinstance(meta(one), torch.Tensor) and not meta(one).is_floating_point()
        for one in node.all_input_nodes
    ):
        return f"{node.target} of integers isn't supported"
    return None


def _simple(compute: Callable[..., Any]) -> Compute:
    return lambda bind, *elements: compute(*elements)


def _library(name: str) -> Compute:
    return lambda bind, *elements: s.libm(name, *elements)


_FLOATS, _DOUBLE = "float32 float64", "float64"


# --- functions of one element --------------------------------------------------------------------

for _name in (
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "asinh",
    "acosh",
    "atanh",
    "exp2",
    "expm1",
    "log2",
    "log10",
    "log1p",
    "erfc",
    "lgamma",
):
    _plain(_name, "self", _library(_name), "INT_TO_FLOAT", cost=40, library=_FLOATS)

_plain(
    "exp",
    "self",
    lambda bind, x: exponentials.exp(x, bind),
    "INT_TO_FLOAT",
    cost=20,
    library=_DOUBLE,
)
_plain(
    "log",
    "self",
    lambda bind, x: exponentials.log(x, bind),
    "INT_TO_FLOAT",
    cost=25,
    library=_DOUBLE,
)
_plain(
    "tanh",
    "self",
    lambda bind, x: exponentials.tanh(x, bind),
    "INT_TO_FLOAT",
    cost=30,
    library=_DOUBLE,
)
_plain(
    "erf",
    "self",
    lambda bind, x: exponentials.erf(x, bind),
    "INT_TO_FLOAT",
    cost=30,
    library=_DOUBLE,
)
_plain(
    "sigmoid",
    "self",
    lambda bind, x: exponentials.sigmoid(x, bind),
    "INT_TO_FLOAT",
    cost=22,
    library=_DOUBLE,
)
_plain("sqrt", "self", _simple(s.sqrt), "INT_TO_FLOAT", cost=4)
_plain("rsqrt", "self", lambda bind, x: s.reciprocal(s.sqrt(x)), "INT_TO_FLOAT", cost=6)
_plain("reciprocal", "self", _simple(s.reciprocal), "INT_TO_FLOAT", cost=3)
_plain("abs", "self", _simple(s.absolute))
_plain("neg", "self", _simple(s.neg))
_plain("sign", "self", _simple(s.sign), why_not=_float_only)
_plain("floor", "self", _simple(s.floor))
_plain("ceil", "self", _simple(s.ceil))
_plain("trunc", "self", _simple(s.trunc))
_plain("round", "self", _simple(s.round_even))
_plain("frac", "self", lambda bind, x: x - s.trunc(x), why_not=_float_only)
_plain("relu", "self", lambda bind, x: s.maximum(x, s.const(0, s.dtype_of(x))))
_plain("isnan", "self", lambda bind, x: s.is_nan(x), "ALWAYS_BOOL", why_not=_float_only)
_plain("logical_not", "self", lambda bind, x: tirx.Not(s.cast(x, "bool")), "ALWAYS_BOOL")


def _is_infinite(bind: Any, x: Any) -> Any:
    return tirx.EQ(s.absolute(x), s.const(float("inf"), s.dtype_of(x)))


_plain("isinf", "self", _is_infinite, "ALWAYS_BOOL", why_not=_float_only)


def _bitwise_not(bind: Any, x: Any) -> Any:
    return tirx.Not(x) if s.dtype_of(x) == "bool" else tirx.bitwise_not(x)


_plain("bitwise_not", "self", _bitwise_not)


# --- of two --------------------------------------------------------------------------------------


def _sum_of(sign: int, swap: bool) -> Callable[[Node, Arguments], Value]:
    """``self + alpha * other``, and its relatives."""

    def emit(node: Node, a: Arguments) -> Value:
        dtype = _common(node, ["self", "other"], "DEFAULT")
        alpha = a.get("alpha", 1)
        left, right = _as(a["self"], dtype), _as(a["other"], dtype)
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


_plain("mul.Tensor mul.Scalar", "self other", _product)
_plain("div.Tensor div.Scalar", "self other", _simple(s.divide), "INT_TO_FLOAT", cost=3)
_plain("atan2", "self other", _library("atan2"), "INT_TO_FLOAT", cost=60, library=_FLOATS)
_plain("hypot", "self other", _library("hypot"), cost=20, why_not=_float_only, library=_FLOATS)
_plain(
    "copysign.Tensor",
    "self other",
    _library("copysign"),
    "INT_TO_FLOAT",
    library=_FLOATS,
)


def _or_bool(compute: Compute, of_bools: Compute) -> Compute:
    """One form for numbers and one for booleans."""
    return lambda bind, *xs: (of_bools if s.dtype_of(xs[0]) == "bool" else compute)(bind, *xs)


_either, _both = _simple(tirx.Or), _simple(tirx.And)
_plain("maximum", "self other", _or_bool(_simple(s.maximum), _either))
_plain("minimum", "self other", _or_bool(_simple(s.minimum), _both))
_plain("fmax", "self other", _or_bool(_simple(s.fmax), _either))
_plain("fmin", "self other", _or_bool(_simple(s.fmin), _both))


_COMPARISONS: dict[str, Compute] = {
    "eq": _simple(s.equal),
    "ne": _simple(s.not_equal),
    "lt": _simple(tirx.LT),
    "le": _simple(lambda x, y: tirx.Or(x < y, s.equal(x, y))),
    "gt": _simple(tirx.GT),
    "ge": _simple(lambda x, y: tirx.Or(x > y, s.equal(x, y))),
}


def _of_numbers(compute: Compute) -> Compute:
    """Booleans are compared as 0 and 1."""

    def apply(bind: Any, x: Any, y: Any) -> Any:
        if s.dtype_of(x) == "bool":
            x, y = s.cast(x, "int32"), s.cast(y, "int32")
        return compute(bind, x, y)

    return apply


for _name, _compare in _COMPARISONS.items():
    _plain(f"{_name}.Tensor {_name}.Scalar", "self other", _of_numbers(_compare))


def _logical(compute: Compute) -> Compute:
    return lambda bind, x, y: compute(bind, s.cast(x, "bool"), s.cast(y, "bool"))


_exclusive = _simple(s.exclusive)

_plain("logical_and", "self other", _logical(_both), "ALWAYS_BOOL")
_plain("logical_or", "self other", _logical(_either), "ALWAYS_BOOL")
_plain("logical_xor", "self other", _logical(_exclusive), "ALWAYS_BOOL")
for _name, _bools, _bits in (
    ("and", _both, _simple(tirx.bitwise_and)),
    ("or", _either, _simple(tirx.bitwise_or)),
    ("xor", _exclusive, _simple(tirx.bitwise_xor)),
):
    _plain(f"bitwise_{_name}.Tensor bitwise_{_name}.Scalar", "self other", _or_bool(_bits, _bools))


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
    dtype = _common(node, ["self", "other"], kind)
    floats = {
        None: s.divide,
        "floor": s.floor_divide,
        "trunc": lambda x, y: s.trunc(s.divide(x, y)),
    }[mode]
    whole = {None: s.divide, "floor": tirx.floordiv, "trunc": tirx.truncdiv}[mode]
    compute = floats if dtype in s.FLOATS else whole
    values = _as(a["self"], dtype), _as(a["other"], dtype)
    result = dtype_of(node)

    def element(bind: Any, x: Any, y: Any) -> Any:
        return s.cast(bind(compute(x, y)), result)

    scalar = mode == "floor" and dtype in s.FLOATS
    return point(shape_of(node), result, element, *values, cost=20, scalar=scalar)


register("div.Tensor_mode", Op(_rounded_division, _whole_by_constant))
_plain(
    "floor_divide",
    "self other",
    _whole_or(_simple(s.floor_divide), _simple(tirx.floordiv)),
    cost=20,
    why_not=_whole_by_constant,
    library=_FLOATS,
)
_plain(
    "fmod.Tensor fmod.Scalar",
    "self other",
    _whole_or(_simple(s.fmod), _simple(tirx.truncmod)),
    cost=20,
    why_not=_whole_by_constant,
    library=_FLOATS,
)
_plain(
    "remainder.Tensor remainder.Scalar",
    "self other",
    _whole_or(_simple(s.remainder), _simple(tirx.floormod)),
    cost=20,
    why_not=_whole_by_constant,
    library=_FLOATS,
)


def _shift_by_constant(node: Node) -> str | None:
    other = named_arguments(node)["other"]
    own = node.meta["val"].dtype
    if own in (torch.int32, torch.int64) and type(other) is int and 0 <= other < 31:
        return None
    return "integers are shifted by small constants only"


_plain(
    "bitwise_left_shift.Tensor_Scalar __lshift__.Scalar",
    "self other",
    _simple(tirx.shift_left),
    why_not=_shift_by_constant,
)
_plain(
    "bitwise_right_shift.Tensor_Scalar __rshift__.Scalar",
    "self other",
    _simple(tirx.shift_right),
    why_not=_shift_by_constant,
)


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
    dtype = _common(node, ["self", "exponent"], "BOOL_TO_LONG")
    base, exponent = _as(a["self"], dtype), a["exponent"]
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

    return point(shape_of(node), result, element, base, _as(exponent, dtype), cost=80, scalar=True)


def _integer_power(node: Node) -> str | None:
    if node.meta["val"].is_floating_point():
        return None
    exponent = named_arguments(node)["exponent"]
    if not isinstance(exponent, Node) and exponent in _WHOLE_POWERS:
        return None
    return "integers are raised to 1, 2 and 3 only"


register("pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar", Op(_power, _integer_power))


# --- of three ------------------------------------------------------------------------------------


def _where(node: Node, a: Arguments) -> Value:
    dtype = _common(node, ["self", "other"], "NO_OPMATH")
    condition = cast(a["condition"], "bool")
    sides = _as(a["self"], dtype), _as(a["other"], dtype)
    result = dtype_of(node)

    def element(bind: Any, condition: Any, x: Any, y: Any) -> Any:
        return s.cast(s.select(condition, x, y), result)

    return point(shape_of(node), result, element, condition, *sides)


register("where.self", Op(_where))


def _clamp(node: Node, a: Arguments) -> Value:
    names = ["self", *(name for name in ("min", "max") if a.get(name) is not None)]
    dtype = _common(node, names, "DEFAULT")
    values = [_as(a[name], dtype) for name in names]
    result = dtype_of(node)

    def element(bind: Any, x: Any, *bounds: Any) -> Any:
        limits = dict(zip(names[1:], bounds, strict=True))
        if "min" in limits:
            x = bind(s.maximum(x, limits["min"]))
        if "max" in limits:
            x = bind(s.minimum(x, limits["max"]))
        return s.cast(x, result)

    return point(shape_of(node), result, element, *values, cost=3)


register("clamp clamp.Tensor clamp_min clamp_max", Op(_clamp))


# --- conversions and copies ----------------------------------------------------------------------


@emitter("clone detach alias lift_fresh_copy _to_copy")
def _copy(node: Node, a: Arguments) -> Value:
    """The same values, in the dtype of the result."""
    return cast(a["self"], dtype_of(node))


@emitter("prims.convert_element_type")
def _convert(node: Node, a: Arguments) -> Value:
    return cast(a["a"], dtype_of(node))


# --- what is made of numbers ---------------------------------------------------------------------


def _filled(node: Node, value: Any) -> Value:
    dtype = dtype_of(node)
    return point(shape_of(node), dtype, lambda bind: s.const(value, dtype), cost=0)


def _number_only(node: Node) -> str | None:
    given = named_arguments(node)
    value = given.get("fill_value", given.get("s", given.get("value", 0)))
    if isinstance(value, Node):
        return "it is filled with a number that only a call knows"
    return None


register(
    "full full_like new_full scalar_tensor",
    Op(
        lambda node, a: _filled(node, a["fill_value"] if "fill_value" in a else a["s"]),
        _number_only,
    ),
)
# What is empty may hold anything.
_EMPTY = "empty.memory_format empty_like new_empty"
register(f"zeros zeros_like new_zeros {_EMPTY}", Op(lambda node, a: _filled(node, 0)))
register("fill.Scalar", Op(lambda node, a: _filled(node, a["value"]), _number_only))
register("ones ones_like new_ones", Op(lambda node, a: _filled(node, 1)))
