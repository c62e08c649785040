"""Pointwise ops, promotion of types, integer division."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fuseboard.testing.program import Program, flags, function, ints, rnd, special, trained

BF16 = torch.bfloat16


def _chain(x: Tensor, y: Tensor) -> Any:
    a = torch.tanh(x * 2.5 + y).exp() / torch.sqrt(torch.abs(x) + 1)
    return a, torch.sigmoid(a - y).clamp(0.2, 0.9), torch.where(x > y, x.square(), y.sin())


def _integers(x: Tensor, y: Tensor) -> Any:
    return x + y * 3, torch.sub(x, y, alpha=2), x.abs() - (-y), x & y, x | 5, x ^ y, x << 2, x >> 1


def _booleans(x: Tensor, y: Tensor) -> Any:
    return x & y, x | y, x ^ y, ~x, torch.logical_not(y), x == y, x.sum(), torch.where(x, 2, 3)


def _activations(x: Tensor) -> Any:
    shrunk = F.hardtanh(x, -0.5, 0.7), F.hardswish(x), F.relu6(x * 4), F.leaky_relu(x, 0.2)
    smooth = F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.elu(x), F.softplus(x), F.mish(x)
    return (F.relu(x), F.hardsigmoid(x), F.logsigmoid(x), *shrunk, *smooth)


def _alphas(x: Tensor, y: Tensor, z: Tensor) -> Any:
    return (
        torch.add(x, y, alpha=2.5),
        torch.sub(x, y, alpha=-0.5),
        torch.rsub(x, 3.0, alpha=2),
        torch.addcmul(z, x, y, value=0.3),
        torch.lerp(x, y, 0.7),
    )


def _special(x: Tensor, y: Tensor) -> Any:
    ordered = x.relu(), x.clamp(-1, 1), torch.maximum(x, y), torch.minimum(x, y)
    others = torch.fmax(x, y), torch.fmin(x, y), x.nan_to_num(7.0, 8.0, 9.0), x.sign(), x * 0
    return (*ordered, *others, F.hardtanh(y), F.leaky_relu(x), F.gelu(x), torch.tanh(x))


def _zero_signs(x: Tensor) -> Any:
    zeros = -x, x * 1.0, x + 0.0, torch.ceil(x - 0.5), torch.round(x * 0.3), x.clone()
    return tuple(torch.copysign(torch.ones_like(x), zero) for zero in zeros)


def _layouts(x: Tensor, y: Tensor) -> Any:
    return x + y, x * 2, torch.exp(x) - y.sigmoid(), x.to(torch.float64), torch.zeros_like(x) + 1


def _comparisons(x: Tensor, y: Tensor) -> Any:
    ordered = x < y, x <= y, x > y, x >= y, x == y, x != y
    return (*ordered, x.isnan(), x.isinf(), x.isfinite(), x.bool(), torch.isclose(x, y))


_POINTWISE = (
    function("pointwise_float32", _chain, lambda: (rnd(37, 5), rnd(37, 5, seed=1))),
    function("pointwise_broadcast", _chain, lambda: (rnd(5, 1), rnd(7, seed=1))),
    function("pointwise_activations", _activations, lambda: (rnd(13, 7) * 2,)),
    function("pointwise_alpha", _alphas, lambda: (rnd(5, 3), rnd(5, 3, seed=1), rnd(5, 1, seed=2))),
)
_LAYOUTS = (
    function("layout_transposed", _layouts, lambda: (rnd(7, 5).t(), rnd(7, 5, seed=1).t())),
    function("layout_sliced", _layouts, lambda: (rnd(9, 8)[::2, 1:6], rnd(9, 8)[::2, 2:7])),
    function("layout_expanded", _layouts, lambda: (rnd(1, 6).expand(4, 6), rnd(4, 1).expand(4, 6))),
    function(
        "layout_channels_last",
        _layouts,
        lambda: tuple(
            rnd(2, 3, 4, 5, seed=seed).to(memory_format=torch.channels_last) for seed in (0, 1)
        ),
    ),
)
_SIZES = (
    function("size_one", _chain, lambda: (rnd(1, 1), rnd(1, seed=1))),
    function("size_zero", _chain, lambda: (rnd(0, 3), rnd(1, 3, seed=1))),
)
_DTYPES = (
    function(
        "pointwise_bfloat16", _chain, lambda: (rnd(9, 5, dtype=BF16), rnd(9, 5, seed=1, dtype=BF16))
    ),
    function("pointwise_int64", _integers, lambda: (ints(8, 5), ints(8, 5, seed=1))),
    function("pointwise_bool", _booleans, lambda: (flags(8, 5), flags(8, 5, seed=1))),
    function("pointwise_special_values", _special, lambda: (special(9, 9), special(9, 9).t())),
    function(
        "pointwise_zero_signs", _zero_signs, lambda: (torch.tensor([0.0, -0.0, 0.25, -0.25]),)
    ),
    function("pointwise_comparisons", _comparisons, lambda: (special(9, 9), special(9, 9).t())),
)


def _promote_scalars(i: Tensor, b: Tensor, h: Tensor) -> Any:
    return i + 1.5, i * True, b + 1, b * 2.5, h * 3, h + 1.5, i / 2, i**2, b / b.logical_not()


def _promote_tensors(i: Tensor, f: Tensor, h: Tensor, b: Tensor) -> Any:
    return i + f, h + f, i * h, b + f, b + i, torch.where(b, h, f), torch.maximum(h, f), i / i


def _promote_zero_dim(f: Tensor, d: Tensor, i: Tensor, h: Tensor) -> Any:
    """A tensor of no dimensions counts less than one that has some."""
    return f * d, h + d, i + d, h * f.sum(), i * 2**40


def _conversions(f: Tensor, i: Tensor) -> Any:
    down = f.to(torch.int32), f.long(), f.bool(), f.bfloat16(), f.half().float()
    return (*down, i.to(torch.int8), i.float(), i.bool(), f.to(BF16).to(torch.float64), f.double())


def _small_integers(x: Tensor, y: Tensor) -> Any:
    return x + y, x * y, x - y, -x, x.sum(), x.to(torch.int8) + 100


_PROMOTION = (
    function(
        "promotion_scalars", _promote_scalars, lambda: (ints(6), flags(6), rnd(6, dtype=BF16))
    ),
    function(
        "promotion_tensors",
        _promote_tensors,
        lambda: (ints(6, low=1), rnd(6), rnd(6, seed=1, dtype=BF16), flags(6)),
    ),
    function(
        "promotion_zero_dim",
        _promote_zero_dim,
        lambda: (rnd(6), torch.tensor(1.1, dtype=torch.float64), ints(6), rnd(6, dtype=BF16)),
        reference=False,  # the zero-dim float64 isn't the only one then
    ),
    function(
        "promotion_conversions",
        _conversions,
        lambda: (rnd(8) * 50, ints(8, low=-300, high=300)),
        reference=False,  # a float64 would be rounded once less
    ),
    function(
        "promotion_uint8_wraps",
        _small_integers,
        lambda: (ints(7, low=200, high=256).to(torch.uint8), ints(7, low=99, high=256).byte()),
    ),
)


def _divisions(x: Tensor, y: Tensor) -> Any:
    floor = torch.div(x, y, rounding_mode="floor"), x // y, x // -4, x // 3
    trunc = torch.div(x, y, rounding_mode="trunc"), torch.div(x, -4, rounding_mode="trunc")
    return (*floor, *trunc, x % y, x % -4, torch.fmod(x, y), torch.fmod(x, -4))


def _nonzero(tensor: Tensor) -> Tensor:
    return torch.where(tensor == 0, 3, tensor)


_INTEGERS = (
    function("integer_division", _divisions, lambda: (ints(40), _nonzero(ints(40, seed=1)))),
    # Multiples of a quarter: quotients are exact or far from the next integer.
    function(
        "integer_division_of_floats",
        _divisions,
        lambda: (ints(40).float() / 4, _nonzero(ints(40, seed=1)).float() / 2),
    ),
    function(
        "integer_overflow",
        lambda x: (x + x, x * 3, -x, x.abs(), x.int() * 2, (x << 60) + 1, x >> 40, ~x),
        lambda: (torch.tensor([2**62, -(2**63), 2**63 - 1, 2**31 - 1]),),
    ),
)

PROGRAMS: tuple[Program, ...] = (
    *_POINTWISE,
    *_LAYOUTS,
    *_SIZES,
    *_DTYPES,
    *_PROMOTION,
    *_INTEGERS,
    *trained(_POINTWISE[:2]),
)
