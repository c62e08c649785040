"""Functions that kernels call: libdevice's where they run on a GPU, NumPy's in the interpreter.

``tl.exp`` and its like are approximations of two units in the last place and more; libdevice's
functions are what ATen's CUDA kernels call. The interpreter has no libdevice, so its tests would
not see them: there each is a function on NumPy arrays that is computed in float64 and rounded.

Kernels import these names one by one: Triton replaces libdevice's stubs by a target's functions
only where they are globals of the kernel's own module.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

#: Read once: Triton itself decides when ``@triton.jit`` is applied.
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

NAMES = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "erf", "erfc"),
    *("exp", "exp2", "expm1", "fmod", "log", "log10", "log1p", "log2", "pow", "rint", "rsqrt"),
    *("sin", "sinh", "tan", "tanh"),
)

if INTERPRETING:
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    def _lift(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*operands: Any) -> Any:
            first = operands[0]
            with np.errstate(all="ignore"):
                arrays = [operand.handle.data.astype(np.float64) for operand in operands]
                result = np.asarray(function(*arrays)).astype(first.handle.data.dtype)
            type_ = first.type
            if result.shape != first.handle.data.shape:
                type_ = tl.block_type(first.dtype, list(result.shape))
            return tl.tensor(TensorHandle(result, first.dtype.scalar), type_)

        return call

    def _special(function: Callable[[float], float]) -> Callable[..., Any]:
        return np.vectorize(function, otypes=[np.float64])

    _NUMPY = {
        "acos": np.arccos,
        "acosh": np.arccosh,
        "asin": np.arcsin,
        "asinh": np.arcsinh,
        "atan": np.arctan,
        "atan2": np.arctan2,
        "atanh": np.arctanh,
        "erf": _special(math.erf),
        "erfc": _special(math.erfc),
        "pow": np.power,
        "rsqrt": lambda x: 1.0 / np.sqrt(x),
    }
    globals().update({name: _lift(_NUMPY.get(name) or getattr(np, name)) for name in NAMES})

    def _nearest_bfloat16(handle: Any) -> Any:
        bits = handle.data.astype(np.float32).view(np.uint32)
        even = (bits >> 16) & 1
        kept = (bits + np.uint32(0x7FFF) + even.astype(np.uint32)) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(handle.data), bits, kept).view(np.float32)

    def narrow(x: Any, dtype: Any) -> Any:
        """A value in another dtype, rounded to nearest: the interpreter cuts bfloat16 off."""
        if getattr(dtype, "value", dtype) == tl.bfloat16 and x.dtype.scalar == tl.float32:
            x = tl.tensor(TensorHandle(_nearest_bfloat16(x.handle), tl.float32), x.type)
        return x.to(dtype)
else:
    from triton.language.extra import libdevice

    globals().update({name: getattr(libdevice, name) for name in NAMES})

    @triton.jit
    def narrow(x, DTYPE: tl.constexpr):
        """A value in another dtype, rounded to nearest."""
        return x.to(DTYPE)


@triton.jit
def max_rows(x, AXIS: tl.constexpr):
    """The largest along an axis, NaN where there is one; ``tl.max`` alone drops NaN."""
    largest = tl.max(x, AXIS)
    spoilt = tl.max((x != x).to(tl.int32), AXIS)
    return tl.where(spoilt != 0, float("nan"), largest)


@triton.jit
def min_rows(x, AXIS: tl.constexpr):
    """The smallest along an axis, NaN where there is one."""
    smallest = tl.min(x, AXIS)
    spoilt = tl.max((x != x).to(tl.int32), AXIS)
    return tl.where(spoilt != 0, float("nan"), smallest)


@triton.jit
def floor_divide_int(a, b):
    """Rounded down; Triton's ``//`` rounds towards zero, as C does."""
    quotient = a // b
    remainder = a - quotient * b
    return tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def remainder_int(a, b):
    """With the divisor's sign."""
    remainder = a % b
    return tl.where((remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder)
