"""ONNX forms of arithmetic on sizes, which decompositions write where a size follows from others.

A size is an int, or a value of int64 without dimensions. Python rounds a quotient down, and a
remainder has the sign of its divisor; ONNX's ``Div`` rounds to zero, its ``Mod`` is Python's.
What a factor makes of a size, as in an interpolation, is computed in float64, as by Python.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

import fuseboard

#: The highest power that is written out as products.
MOST_FACTORS = 8


def size_arithmetic(op: Any) -> dict[Any, Callable[..., Any]]:
    """Function on sizes → what writes it.

    :param op: ONNX's operators, as onnxscript has them.
    """

    import onnx_ir as ir

    def value(number: Any) -> Any:
        if isinstance(number, float):
            return op.Constant(value=ir.tensor(number, ir.DataType.DOUBLE))
        return op.Constant(value_int=number) if isinstance(number, int) else number

    def to_float(number: Any) -> Any:
        return op.Cast(value(number), to=ir.DataType.DOUBLE)

    def to_int(number: Any) -> Any:
        return op.Cast(number, to=ir.DataType.INT64)  # towards zero

    def of_two(write: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        return lambda a, b: write(value(a), value(b))

    def floordiv(a: Any, b: Any) -> Any:
        return op.Div(op.Sub(a, op.Mod(a, b)), b)

    def power(base: Any, exponent: Any) -> Any:
        if not isinstance(exponent, int) or not 0 < exponent <= MOST_FACTORS:
            raise fuseboard.LoweringError(f"a size to the power of {exponent} has no ONNX form")
        return reduce(op.Mul, [value(base)] * exponent)

    return {
        operator.add: of_two(op.Add),
        operator.sub: of_two(op.Sub),
        operator.mul: of_two(op.Mul),
        operator.floordiv: of_two(floordiv),
        operator.mod: of_two(op.Mod),
        operator.neg: lambda a: op.Neg(value(a)),
        operator.pow: power,
        operator.truediv: lambda a, b: op.Div(to_float(a), to_float(b)),
        math.trunc: to_int,
        math.floor: lambda a: to_int(op.Floor(a)),
        math.ceil: lambda a: to_int(op.Ceil(a)),
        torch.sym_float: to_float,
        torch.sym_max: of_two(op.Max),
        torch.sym_min: of_two(op.Min),
        torch.sym_sum: lambda terms: reduce(op.Add, map(value, terms)),
    }
