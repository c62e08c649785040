"""Arithmetic on single elements, as ATen does it, in TVM's expressions.

Every function takes and returns ``tirx`` expressions of one element; the caller has promoted
dtypes. Exponential functions of float32 are polynomials, because LLVM calls libm's functions
one lane at a time; their coefficients are those of the Cephes library and of
``aten/src/ATen/cpu/vec/vec_base.h``'s vector classes (SLEEF), checked by the sweep.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import tirx

Expr = Any
FLOATS = ("float32", "float64")
INTS = ("int8", "uint8", "int16", "int32", "int64")


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


def maximum(a: Expr, b: Expr) -> Expr:
    """NaN if either is."""
    if dtype_of(a) not in FLOATS:
        return tirx.Max(a, b)
    return select(tirx.Or(a > b, is_nan(a)), a, b)


def minimum(a: Expr, b: Expr) -> Expr:
    """NaN if either is."""
    if dtype_of(a) not in FLOATS:
        return tirx.Min(a, b)
    return select(tirx.Or(a < b, is_nan(a)), a, b)


def fmax(a: Expr, b: Expr) -> Expr:
    """The other one if one is NaN."""
    if dtype_of(a) not in FLOATS:
        return tirx.Max(a, b)
    return select(tirx.Or(a > b, is_nan(b)), a, b)


def fmin(a: Expr, b: Expr) -> Expr:
    """The other one if one is NaN."""
    if dtype_of(a) not in FLOATS:
        return tirx.Min(a, b)
    return select(tirx.Or(a < b, is_nan(b)), a, b)


def sign(x: Expr) -> Expr:
    """-1, 0 or 1; 0 for NaN, as in ATen."""
    dtype = dtype_of(x)
    zero = const(0, dtype)
    below = select(x < zero, neg(const(1, dtype)) if dtype != "uint8" else zero, zero)
    return select(x > zero, const(1, dtype), below)


def absolute(x: Expr) -> Expr:
    dtype = dtype_of(x)
    if dtype == "uint8":
        return x
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


# --- exponential functions of float32 ------------------------------------------------------------


def _polynomial(x: Expr, coefficients: tuple[float, ...]) -> Expr:
    result = const(coefficients[0], "float32")
    for coefficient in coefficients[1:]:
        result = result * x + const(coefficient, "float32")
    return result


def exp(x: Expr, bind: Callable[[Expr], Expr]) -> Expr:
    """Cephes' ``expf``: 2**n times a polynomial; within 1 ulp or so; NaN and infinities kept."""
    if dtype_of(x) != "float32":
        return libm("exp", x)
    f = "float32"
    top, bottom = const(88.72283, f), const(-103.97208, f)
    # NaN takes the last operand of each comparison: it is kept.
    inside = bind(select(x > top, top, select(x < bottom, bottom, x)))
    n = bind(floor(inside * const(1.44269504088896341, f) + const(0.5, f)))
    r = bind(inside - n * const(0.693359375, f))
    r = bind(r - n * const(-2.12194440e-4, f))
    p = _polynomial(
        r,
        (
            1.9875691500e-4,
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        ),
    )
    y = bind(p * r * r + r + const(1.0, f))
    # Two factors: 2**n alone overflows for n = 128 and is subnormal below -126.
    whole = select(is_nan(x), const(0, "int32"), tirx.Cast("int32", n))
    whole = bind(whole)
    half = bind(tirx.shift_right(whole, const(1, "int32")))
    result = y * _power_of_two(half) * _power_of_two(whole - half)
    result = select(x < bottom, const(0.0, f), result)
    return select(x > top, const(math.inf, f), result)


def _power_of_two(n: Expr) -> Expr:
    bits = tirx.shift_left(n + const(127, "int32"), const(23, "int32"))
    return tirx.reinterpret("float32", bits)


def sigmoid(x: Expr, bind: Callable[[Expr], Expr]) -> Expr:
    one = const(1.0, dtype_of(x))
    return tirx.Div(one, one + exp(bind(neg(x)), bind))


def tanh(x: Expr, bind: Callable[[Expr], Expr]) -> Expr:
    """Cephes' ``tanhf``: a polynomial near zero, by exp elsewhere."""
    if dtype_of(x) != "float32":
        return libm("tanh", x)
    f = "float32"
    size = bind(absolute(x))
    square = bind(x * x)
    near = _polynomial(
        square,
        (
            -5.70498872745e-3,
            2.06390887954e-2,
            -5.37397155531e-2,
            1.33314422036e-1,
            -3.33332819422e-1,
        ),
    )
    near = near * square * x + x
    grown = exp(bind(size + size), bind)
    far = const(1.0, f) - tirx.Div(const(2.0, f), grown + const(1.0, f))
    far = select(x < const(0.0, f), neg(bind(far)), far)
    return select(size < const(0.625, f), near, far)


def erf(x: Expr, bind: Callable[[Expr], Expr]) -> Expr:
    """Odd polynomial within 1, by 1 - P * exp(-x*x) outside (N. Juffa, 1 ulp, BSD)."""
    if dtype_of(x) != "float32":
        return libm("erf", x)
    f = "float32"
    size = bind(absolute(x))
    square = bind(x * x)
    far = _polynomial(size, (-1.72853470e-5, 3.83197126e-4))
    low = _polynomial(size, (-3.88396438e-3, 2.42546219e-2))
    far = bind(far * square + low)
    far = far * size + const(-1.06777877e-1, f)
    far = far * size + const(-6.34846687e-1, f)
    far = far * size + const(-1.28717512e-1, f)
    far = bind(far * size - size)
    far = bind(const(1.0, f) - exp(far, bind))
    far = select(x < const(0.0, f), neg(far), far)
    near = _polynomial(
        square,
        (
            -5.96761703e-4,
            4.99119423e-3,
            -2.67681349e-2,
            1.12819925e-1,
            -3.76125336e-1,
            1.28379166e-1,
        ),
    )
    near = near * x + x
    return select(size > const(0.927734375, f), far, near)


def log(x: Expr, bind: Callable[[Expr], Expr]) -> Expr:
    """Cephes' ``logf``, subnormal numbers included."""
    if dtype_of(x) != "float32":
        return libm("log", x)
    f, i = "float32", "int32"
    small = bind(x < const(1.17549435e-38, f))
    scaled = bind(select(small, x * const(8388608.0, f), x))
    bits = bind(tirx.reinterpret(i, scaled))
    exponent = tirx.bitwise_and(tirx.shift_right(bits, const(23, i)), const(255, i))
    mantissa = tirx.bitwise_or(tirx.bitwise_and(bits, const(0x7FFFFF, i)), const(0x3F000000, i))
    m = bind(tirx.reinterpret(f, mantissa))
    low = bind(m < const(0.707106781186547524, f))
    e = tirx.Cast(f, exponent - const(126, i))
    e = bind(e - select(small, const(23.0, f), const(0.0, f)))
    e = bind(select(low, e - const(1.0, f), e))
    r = bind(select(low, m + m, m) - const(1.0, f))
    z = bind(r * r)
    p = _polynomial(
        r,
        (
            7.0376836292e-2,
            -1.1514610310e-1,
            1.1676998740e-1,
            -1.2420140846e-1,
            1.4249322787e-1,
            -1.6668057665e-1,
            2.0000714765e-1,
            -2.4999993993e-1,
            3.3333331174e-1,
        ),
    )
    y = p * r * z + e * const(-2.12194440e-4, f) - const(0.5, f) * z
    result = r + y + e * const(0.693359375, f)
    result = select(x < const(0.0, f), const(math.nan, f), result)
    result = select(tirx.EQ(x, const(0.0, f)), const(-math.inf, f), result)
    return select(tirx.Or(is_nan(x), tirx.EQ(x, const(math.inf, f))), x, result)
