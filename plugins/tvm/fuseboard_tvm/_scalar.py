"""Arithmetic on single elements, as ATen does it, in TVM's expressions.

Every function takes and returns ``tirx`` expressions of one element; the caller has promoted
dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import tirx

Expr = Any
FLOATS = ("float32", "float64")


def const(value: Any, dtype: str) -> Expr:
    """A literal of a dtype."""
    if dtype == "bool":
        return tirx.const(bool(value), "bool")
    return tirx.const(float(value) if dtype in FLOATS else int(value), dtype)


def dtype_of(x: Expr) -> str:
    return str(x.ty.dtype)


def is_nan(x: Expr) -> Expr:
    """By the bits: TVM's ``isnan`` isn't vectorised, and its ``!=`` is false for NaN."""
    if dtype_of(x) == "float32":
        size = tirx.bitwise_and(tirx.reinterpret("int32", x), const(0x7FFFFFFF, "int32"))
        return size > const(0x7F800000, "int32")
    size = tirx.bitwise_and(tirx.reinterpret("int64", x), const((1 << 63) - 1, "int64"))
    return size > const(0x7FF0000000000000, "int64")


def exclusive(a: Expr, b: Expr) -> Expr:
    """One of two booleans, and not both."""
    return tirx.Or(tirx.And(a, tirx.Not(b)), tirx.And(tirx.Not(a), b))


def equal(a: Expr, b: Expr) -> Expr:
    """False where either is NaN. (TVM folds ``x == x`` to true.)"""
    if dtype_of(a) not in FLOATS:
        return tirx.EQ(a, b)
    return tirx.And(tirx.EQ(a, b), tirx.Not(is_nan(a)))


def not_equal(a: Expr, b: Expr) -> Expr:
    """True where either is NaN."""
    dtype = dtype_of(a)
    if dtype == "bool":
        return exclusive(a, b)
    if dtype not in FLOATS:
        return tirx.NE(a, b)
    apart = tirx.Or(a < b, a > b)
    for one in (a, b):
        if not isinstance(one, tirx.FloatImm):
            apart = tirx.Or(apart, is_nan(one))
    return apart


def select(condition: Expr, yes: Expr, no: Expr) -> Expr:
    """Both sides are evaluated: they must be safe to evaluate."""
    return tirx.Select(condition, yes, no)


def cast(x: Expr, dtype: str) -> Expr:
    """Conversion as in C, and to bool as a comparison with zero."""
    own = dtype_of(x)
    if own == dtype:
        return x
    if dtype == "bool":
        return not_equal(x, const(0, own))
    if own == "bool":
        return select(x, const(1, dtype), const(0, dtype))
    return tirx.Cast(dtype, x)


# Integers wrap around in ATen. TVM tells LLVM that neither signed nor unsigned ones of 32 bits or
# more ever do, so that a sum that does is undefined: 32 bits are computed in 64, and 64 in halves.

_LOW = 0xFFFFFFFF


def _in_int64(op: Callable[[Expr, Expr], Expr]) -> Callable[[Expr, Expr], Expr]:
    return lambda a, b: tirx.Cast("int32", op(tirx.Cast("int64", a), tirx.Cast("int64", b)))


def _halves(x: Expr) -> tuple[Expr, Expr]:
    low = tirx.bitwise_and(x, const(_LOW, "int64"))
    return tirx.shift_right(x, const(32, "int64")), low


def _joined(high: Expr, low: Expr) -> Expr:
    """``high * 2**32 + low``, where ``low`` may be more than 32 bits long or negative."""
    carried = high + tirx.shift_right(low, const(32, "int64"))
    rest = tirx.bitwise_and(low, const(_LOW, "int64"))
    return tirx.bitwise_or(tirx.shift_left(carried, const(32, "int64")), rest)


def _by_halves(op: Callable[[Expr, Expr], Expr]) -> Callable[[Expr, Expr], Expr]:
    def apply(a: Expr, b: Expr) -> Expr:
        (high, low), (other_high, other_low) = _halves(a), _halves(b)
        return _joined(op(high, other_high), op(low, other_low))

    return apply


def _long_product(a: Expr, b: Expr) -> Expr:
    (high, low), (other_high, other_low) = _halves(a), _halves(b)
    quarter = const(16, "int64")
    first = tirx.bitwise_and(low, const(0xFFFF, "int64")) * other_low
    second = tirx.shift_right(low, quarter) * other_low
    whole = _by_halves(tirx.Add)(first, tirx.shift_left(second, quarter))
    mask = const(_LOW, "int64")
    crossed = tirx.bitwise_and(high * other_low, mask) + tirx.bitwise_and(low * other_high, mask)
    return _by_halves(tirx.Add)(whole, tirx.shift_left(crossed, const(32, "int64")))


def _wrapping(
    op: Callable[[Expr, Expr], Expr], long: Callable[[Expr, Expr], Expr]
) -> Callable[[Expr, Expr], Expr]:
    def apply(a: Expr, b: Expr) -> Expr:
        kind = dtype_of(a)
        return (long if kind == "int64" else _in_int64(op) if kind == "int32" else op)(a, b)

    return apply


add = _wrapping(tirx.Add, _by_halves(tirx.Add))
_sub = _wrapping(tirx.Sub, _by_halves(tirx.Sub))


def sub(a: Expr, b: Expr) -> Expr:
    """A difference. TVM folds ``x - x`` to 0 and loses NaN, but not through an intrinsic."""
    dtype = dtype_of(a)
    if dtype in FLOATS:
        return tirx.call_llvm_pure_intrin(dtype, "llvm.fma", b, const(-1.0, dtype), a)
    return _sub(a, b)


_mul = _wrapping(tirx.Mul, _long_product)


def mul(a: Expr, b: Expr) -> Expr:
    """A product. TVM folds ``x * 0`` to 0, which loses NaN: such a factor goes another way."""
    for factor, other in ((a, b), (b, a)):
        if isinstance(factor, tirx.FloatImm) and factor.value == 0.0:
            dtype = dtype_of(a)
            return tirx.call_llvm_pure_intrin(dtype, "llvm.fma", other, factor, const(-0.0, dtype))
    return _mul(a, b)


def neg(x: Expr) -> Expr:
    dtype = dtype_of(x)
    if dtype in FLOATS:
        return tirx.Mul(x, const(-1.0, dtype))
    return sub(const(0, dtype), x)


def libm(name: str, *args: Expr) -> Expr:
    """A call of the C library."""
    dtype = dtype_of(args[0])
    return tirx.call_pure_extern(dtype, name + ("f" if dtype == "float32" else ""), *args)


def _extreme(greatest: bool, keeps_nan: bool) -> Callable[[Expr, Expr], Expr]:
    """The greater or lesser of two; of a number and NaN the latter, or the number."""

    def apply(a: Expr, b: Expr) -> Expr:
        if dtype_of(a) not in FLOATS:
            return tirx.Max(a, b) if greatest else tirx.Min(a, b)
        first = a > b if greatest else a < b
        return select(tirx.Or(first, is_nan(a if keeps_nan else b)), a, b)

    return apply


maximum, minimum = _extreme(True, keeps_nan=True), _extreme(False, keeps_nan=True)
fmax, fmin = _extreme(True, keeps_nan=False), _extreme(False, keeps_nan=False)


def sign(x: Expr) -> Expr:
    """-1, 0 or 1; 0 for NaN, as in ATen."""
    dtype = dtype_of(x)
    zero = const(0, dtype)
    return select(x > zero, const(1, dtype), select(x < zero, const(-1, dtype), zero))


def absolute(x: Expr) -> Expr:
    dtype = dtype_of(x)
    if dtype in FLOATS:
        return tirx.call_llvm_pure_intrin(dtype, "llvm.fabs", x)
    return select(x < const(0, dtype), neg(x), x)


def _rounding(name: str) -> Callable[[Expr], Expr]:
    def apply(x: Expr) -> Expr:
        dtype = dtype_of(x)
        return tirx.call_llvm_pure_intrin(dtype, name, x) if dtype in FLOATS else x

    return apply


floor = _rounding("llvm.floor")
ceil = _rounding("llvm.ceil")
trunc = _rounding("llvm.trunc")
round_even = _rounding("llvm.nearbyint")


def sqrt(x: Expr) -> Expr:
    return tirx.call_llvm_pure_intrin(dtype_of(x), "llvm.sqrt", x)


def divide(a: Expr, b: Expr) -> Expr:
    """Of floats. TVM refuses a literal zero as divisor."""
    if isinstance(b, tirx.FloatImm) and b.value == 0.0:
        infinity = const(math.copysign(math.inf, b.value), dtype_of(a))
        return tirx.Mul(a, infinity)
    return tirx.Div(a, b)


def reciprocal(x: Expr) -> Expr:
    return tirx.Div(const(1.0, dtype_of(x)), x)


def floor_divide(a: Expr, b: Expr) -> Expr:
    """Towards minus infinity, as ``div_floor`` in ``c10/util/generic_math.h``. Floats."""
    dtype = dtype_of(a)
    zero, one = const(0, dtype), const(1, dtype)
    rest = fmod(a, b)
    quotient = tirx.Div(a - rest, b)
    off = tirx.And(not_equal(rest, zero), exclusive(b < zero, rest < zero))
    quotient = select(off, quotient - one, quotient)
    down = floor(quotient)
    rounded = select(quotient - down > const(0.5, dtype), down + one, down)
    nothing = libm("copysign", zero, tirx.Div(a, b))
    result = select(tirx.EQ(quotient, zero), nothing, rounded)
    return select(tirx.EQ(b, zero), tirx.Div(a, b), result)


def fmod(a: Expr, b: Expr) -> Expr:
    return libm("fmod", a, b)


def remainder(a: Expr, b: Expr) -> Expr:
    """With the sign of the divisor. Floats."""
    zero = const(0, dtype_of(a))
    rest = fmod(a, b)
    off = tirx.And(not_equal(rest, zero), exclusive(b < zero, rest < zero))
    return select(off, rest + b, rest)


# --- reductions -----------------------------------------------------------------------------------

_MOST = {"int32": 2**31 - 1, "int64": 2**63 - 1}


def identity(how: str, dtype: str) -> Expr:
    """What a reduction starts from."""
    if how in ("sum", "prod"):
        return const(0 if how == "sum" else 1, dtype)
    least = how == "max"
    if dtype in FLOATS:
        return const(-math.inf if least else math.inf, dtype)
    return const(-_MOST[dtype] - 1 if least else _MOST[dtype], dtype)


def combine(how: str, a: Expr, b: Expr) -> Expr:
    """Two partial results of a reduction as one."""
    if how == "sum":
        return add(a, b)
    if how == "prod":
        return mul(a, b)
    return maximum(a, b) if how == "max" else minimum(a, b)
