"""Exponential functions of single elements, as :mod:`fuseboard_tvm._scalar`'s others.

Those of float32 are polynomials, because LLVM calls libm's functions one lane at a time; their
coefficients are those of the Cephes library and of ``aten/src/ATen/cpu/vec/vec_base.h``'s vector
classes (SLEEF), checked by the sweep.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx

from fuseboard_tvm._scalar import Expr, absolute, const, dtype_of, floor, is_nan, libm, neg, select


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
