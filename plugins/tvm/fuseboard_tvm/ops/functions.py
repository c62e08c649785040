"""Functions of one element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from fuseboard_tvm import _exponentials as exponentials
from fuseboard_tvm import _scalar as s
from fuseboard_tvm.ops.promotion import (
    DOUBLE,
    FLOATS,
    Compute,
    float_only,
    library,
    promoting,
    simple,
)

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
    promoting(_name, "self", library(_name), "INT_TO_FLOAT", cost=40, in_library=FLOATS)


def _vectorised(function: Callable[..., Any]) -> Compute:
    return lambda bind, x: function(x, bind)


for _function, _cost in (
    (exponentials.exp, 20),
    (exponentials.log, 25),
    (exponentials.tanh, 30),
    (exponentials.erf, 30),
    (exponentials.sigmoid, 22),
):
    _name, _compute = _function.__name__, _vectorised(_function)
    promoting(_name, "self", _compute, "INT_TO_FLOAT", cost=_cost, in_library=DOUBLE)

promoting("sqrt", "self", simple(s.sqrt), "INT_TO_FLOAT", cost=4)
promoting("rsqrt", "self", lambda bind, x: s.reciprocal(s.sqrt(x)), "INT_TO_FLOAT", cost=6)
promoting("reciprocal", "self", simple(s.reciprocal), "INT_TO_FLOAT", cost=3)
promoting("abs", "self", simple(s.absolute))
promoting("neg", "self", simple(s.neg))
promoting("sign", "self", simple(s.sign), why_not=float_only)
promoting("floor", "self", simple(s.floor))
promoting("ceil", "self", simple(s.ceil))
promoting("trunc", "self", simple(s.trunc))
promoting("round", "self", simple(s.round_even))
promoting("relu", "self", lambda bind, x: s.maximum(x, s.const(0, s.dtype_of(x))))
promoting("isnan", "self", lambda bind, x: s.is_nan(x), "ALWAYS_BOOL", why_not=float_only)
promoting("logical_not", "self", lambda bind, x: tirx.Not(s.cast(x, "bool")), "ALWAYS_BOOL")


def _is_infinite(bind: Any, x: Any) -> Any:
    return tirx.EQ(s.absolute(x), s.const(float("inf"), s.dtype_of(x)))


promoting("isinf", "self", _is_infinite, "ALWAYS_BOOL", why_not=float_only)


def _bitwise_not(bind: Any, x: Any) -> Any:
    return tirx.Not(x) if s.dtype_of(x) == "bool" else tirx.bitwise_not(x)


promoting("bitwise_not", "self", _bitwise_not)
