"""Pointwise ATen ops: how operands are promoted, and which expression computes them.

An expression is Triton source with ``{0}``, ``{1}``... for operands that were cast to the dtype in
which ATen computes the op (float32 for half types).
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

DEFAULT, TO_FLOAT, TO_BOOL = "DEFAULT", "INT_TO_FLOAT", "ALWAYS_BOOL"

_NAN = "propagate_nan=tl.PropagateNan.ALL"

#: Op → expression. Comparisons and tests give booleans, the others the dtype of their operands.
EXPRESSIONS = {
    "abs": "tl.abs({0})",
    "add": "({0} + {1})",
    "and": "({0} & {1})",
    "ceil": "tl.ceil({0})",
    "div": "tl.div_rn({0}, {1})",
    "div_int": "({0} // {1})",
    "eq": "({0} == {1})",
    "floor": "tl.floor({0})",
    "floor_divide_int": "floor_divide_int({0}, {1})",
    "ge": "({0} >= {1})",
    "gt": "({0} > {1})",
    "isinf": "(tl.abs({0}) == float('inf'))",
    "isnan": "({0} != {0})",
    "keep": "{0}",
    "le": "({0} <= {1})",
    "lt": "({0} < {1})",
    "maximum": "tl.maximum({0}, {1}, " + _NAN + ")",
    "minimum": "tl.minimum({0}, {1}, " + _NAN + ")",
    "mul": "({0} * {1})",
    "ne": "({0} != {1})",
    "neg": "(-{0})",
    "not": "({0} == 0)",
    "invert": "(~{0})",
    "or": "({0} | {1})",
    "relu": "tl.where({0} <= 0, 0, {0})",
    "remainder_int": "remainder_int({0}, {1})",
    "sign": "(({0} > 0).to({c}) - ({0} < 0).to({c}))",
    "sqrt": "tl.sqrt_rn({0})",
    "sub": "({0} - {1})",
    "trunc": "tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))",
    "where": "tl.where({0}, {1}, {2})",
    "xor": "({0} ^ {1})",
}
#: What is a function of ``_math``, under the op's name.
FUNCTIONS = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "erf", "erfc"),
    *("exp", "exp2", "expm1", "fmod", "log", "log10", "log1p", "log2", "pow", "rint", "rsqrt"),
    *("sin", "sinh", "tan", "tanh"),
)
EXPRESSIONS.update({name: f"{name}({{0}})" for name in FUNCTIONS})
EXPRESSIONS.update({name: f"{name}({{0}}, {{1}})" for name in ("atan2", "fmod", "pow")})
BOOLEAN = frozenset({"eq", "ge", "gt", "isinf", "isnan", "le", "lt", "ne", "not"})

#: Where a half type's rounding decides between results far apart.
JUMPS = frozenset(
    {*BOOLEAN, "ceil", "floor", "trunc", "rint", "sign", "fmod", "remainder", "floor_divide"}
)

#: ATen op of one or two tensors or numbers → (op, promotion).
SIMPLE: dict[Any, tuple[str, str]] = {
    aten.abs.default: ("abs", DEFAULT),
    aten.bitwise_and.Tensor: ("and", DEFAULT),
    aten.bitwise_and.Scalar: ("and", DEFAULT),
    aten.bitwise_or.Tensor: ("or", DEFAULT),
    aten.bitwise_or.Scalar: ("or", DEFAULT),
    aten.bitwise_xor.Tensor: ("xor", DEFAULT),
    aten.bitwise_xor.Scalar: ("xor", DEFAULT),
    aten.div.Tensor: ("div", TO_FLOAT),
    aten.div.Scalar: ("div", TO_FLOAT),
    aten.maximum.default: ("maximum", DEFAULT),
    aten.minimum.default: ("minimum", DEFAULT),
    aten.mul.Tensor: ("mul", DEFAULT),
    aten.mul.Scalar: ("mul", DEFAULT),
    aten.neg.default: ("neg", DEFAULT),
    aten.relu.default: ("relu", DEFAULT),
    aten.sign.default: ("sign", DEFAULT),
    aten.isnan.default: ("isnan", TO_BOOL),
    aten.isinf.default: ("isinf", TO_BOOL),
    aten.logical_not.default: ("not", TO_BOOL),
    aten.atan2.default: ("atan2", TO_FLOAT),
    aten.sqrt.default: ("sqrt", TO_FLOAT),
}
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    for _overload in ("Tensor", "Scalar"):
        SIMPLE[getattr(getattr(aten, _name), _overload)] = (_name, TO_BOOL)
for _name in FUNCTIONS:
    if _name not in ("atan2", "fmod", "pow", "rint"):
        SIMPLE[getattr(aten, _name).default] = (_name, TO_FLOAT)
#: These leave integers as they are.
ROUNDING = {
    aten.ceil.default: "ceil",
    aten.floor.default: "floor",
    aten.trunc.default: "trunc",
    aten.round.default: "rint",
}
