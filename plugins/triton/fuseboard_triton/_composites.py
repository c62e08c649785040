"""ATen ops that are several steps in one: softmax, norms, activations and their gradients.

Each is computed in float32 from its inputs to its result, as ATen's own CUDA kernels do, and
rounded once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from fuseboard_triton import _shapes as _shapes  # registers what it builds
from fuseboard_triton._build import aten, builder, meta_of, shape_of
from fuseboard_triton._elementwise import as_dtype, where
from fuseboard_triton._ir import Unsupported, Value, const, pointwise, product, reshape
from fuseboard_triton._reductions import extreme, mean_of, shaped, total, variance

F32 = torch.float32


class Float:
    """A value as an operand of Python's operators, in float32."""

    def __init__(self, value: Value | float) -> None:
        self.value = value if isinstance(value, Value) else const(float(value), F32)
        if not self.value.dtype.is_floating_point:
            raise Unsupported(f"{self.value.dtype} isn't supported here")

    def op(self, name: str, *others: Any) -> Float:
        operands = tuple(o.value if isinstance(o, Float) else Float(o).value for o in others)
        return Float(pointwise(name, (self.value, *operands), F32, F32))

    def test(self, name: str, other: Any) -> Value:
        other = other if isinstance(other, Float) else Float(other)
        return pointwise(name, (self.value, other.value), torch.bool, F32)

    def __add__(self, other: Any) -> Float:
        return self.op("add", other)

    def __sub__(self, other: Any) -> Float:
        return self.op("sub", other)

    def __mul__(self, other: Any) -> Float:
        return self.op("mul", other)

    def __truediv__(self, other: Any) -> Float:
        return self.op("div", other)

    def __radd__(self, other: Any) -> Float:
        return Float(other) + self

    def __rsub__(self, other: Any) -> Float:
        return Float(other) - self

    def __rmul__(self, other: Any) -> Float:
        return Float(other) * self

    def __rtruediv__(self, other: Any) -> Float:
        return Float(other) / self

    def __neg__(self) -> Float:
        return self.op("neg")

    def shape(self, shape: tuple[Any, ...]) -> Float:
        return Float(reshape(self.value, shape))

    def sum(self, dims: tuple[int, ...]) -> Float:
        return Float(total(self.value, dims))

    def mean(self, dims: tuple[int, ...]) -> Float:
        return Float(mean_of(self.value, dims))


def choose(condition: Value, yes: Any, no: Any) -> Float:
    yes, no = (o if isinstance(o, Float) else Float(o) for o in (yes, no))
    return Float(where(condition, yes.value, no.value, F32))


def result(value: Float, node: Node) -> Value:
    """What an op of one result returns."""
    return as_dtype(value.value, meta_of(node).dtype)


def sigmoid(x: Float) -> Float:
    return 1.0 / ((-x).op("exp") + 1.0)


# --- activations ----------------------------------------------------------------------------------


@builder(aten.sigmoid.default)
def _sigmoid(node: Node, a: Value) -> Value:
    return result(sigmoid(Float(a)), node)


@builder(aten.silu.default)
def _silu(node: Node, a: Value) -> Value:
    x = Float(a)
    return result(x / ((-x).op("exp") + 1.0), node)


@builder(aten.silu_backward.default)
def _silu_backward(node: Node, grad: Value, a: Value) -> Value:
    x = Float(a)
    s = sigmoid(x)
    return result(Float(grad) * s * (1.0 + x * (1.0 - s)), node)


@builder(aten.sigmoid_backward.default)
def _sigmoid_backward(node: Node, grad: Value, a: Value) -> Value:
    s = Float(a)
    return result(Float(grad) * (1.0 - s) * s, node)


@builder(aten.tanh_backward.default)
def _tanh_backward(node: Node, grad: Value, a: Value) -> Value:
    t = Float(a)
    return result(Float(grad) * (1.0 - t * t), node)


@builder(aten.threshold_backward.default)
def _threshold_backward(node: Node, grad: Value, a: Value, threshold: float) -> Value:
    return result(choose(Float(a).test("le", threshold), 0.0, Float(grad)), node)


_SQRT_HALF = math.sqrt(0.5)
_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715


@builder(aten.gelu.default)
def _gelu(node: Node, a: Value, approximate: str = "none") -> Value:
    x = Float(a)
    if approximate == "tanh":
        inner = _TANH_SCALE * (x + _TANH_CUBE * (x * x * x))
        return result(0.5 * x * (1.0 + inner.op("tanh")), node)
    return result(0.5 * x * (1.0 + (x * _SQRT_HALF).op("erf")), node)


@builder(aten.gelu_backward.default)
def _gelu_backward(node: Node, grad: Value, a: Value, approximate: str = "none") -> Value:
    x, g = Float(a), Float(grad)
    if approximate == "tanh":
        t = (_TANH_SCALE * (x + _TANH_CUBE * (x * x * x))).op("tanh")
        slope = _TANH_SCALE * (1.0 + 3.0 * _TANH_CUBE * (x * x))
        return result(g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope), node)
    cdf = 0.5 * (1.0 + (x * _SQRT_HALF).op("erf"))
    pdf = (-0.5 * (x * x)).op("exp") * (1.0 / math.sqrt(2 * math.pi))
    return result(g * (cdf + x * pdf), node)


@builder(aten.leaky_relu.default)
def _leaky_relu(node: Node, a: Value, slope: float = 0.01) -> Value:
    x = Float(a)
    return result(choose(x.test("gt", 0.0), x, x * slope), node)


@builder(aten.hardtanh.default)
def _hardtanh(node: Node, a: Value, low: float = -1, high: float = 1) -> Value:
    return result(Float(a).op("maximum", low).op("minimum", high), node)


@builder(aten.hardsigmoid.default)
def _hardsigmoid(node: Node, a: Value) -> Value:
    return result((Float(a) + 3.0).op("maximum", 0.0).op("minimum", 6.0) / 6.0, node)


@builder(aten.hardswish.default)
def _hardswish(node: Node, a: Value) -> Value:
    x = Float(a)
    return result(x * (x + 3.0).op("maximum", 0.0).op("minimum", 6.0) / 6.0, node)


@builder(aten.elu.default)
def _elu(node: Node, a: Value, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Value:
    x = Float(a)
    negative = (x * input_scale).op("expm1") * (alpha * scale)
    return result(choose(x.test("le", 0.0), negative, x * scale), node)


@builder(aten.softplus.default)
def _softplus(node: Node, a: Value, beta: Any = 1, threshold: Any = 20) -> Value:
    x = Float(a)
    scaled = x * beta
    curved = scaled.op("exp").op("log1p") / beta
    return result(choose(scaled.test("gt", threshold), x, curved), node)


@builder(aten.addcmul.default, aten.addcdiv.default)
def _addcmul(node: Node, a: Value, b: Value, c: Value, *, value: Any = 1) -> Value:
    both = Float(b) * Float(c) if node.target == aten.addcmul.default else Float(b) / Float(c)
    return result(Float(a) + (both if value == 1 else both * value), node)


@builder(aten.lerp.Scalar)
def _lerp(node: Node, a: Value, b: Value, weight: Any) -> Value:
    x, y = Float(a), Float(b)
    if weight < 0.5:
        return result(x + weight * (y - x), node)
    return result(y - (y - x) * (1.0 - weight), node)


# --- softmax --------------------------------------------------------------------------------------


@builder(aten._softmax.default, aten._log_softmax.default)
def _softmax(node: Node, a: Value, dim: int, half_to_float: bool = False) -> Value:
    if not a.shape:
        raise Unsupported("softmax of one number isn't supported")
    dims = (dim % len(a.shape),)
    shifted = Float(a) - Float(extreme("max", a, dims))
    powers = shifted.op("exp")
    sums = powers.sum(dims)
    if node.target == aten._softmax.default:
        return result(powers / sums, node)
    return result(shifted - sums.op("log"), node)


@builder(aten._softmax_backward_data.default)
def _softmax_backward(node: Node, grad: Value, a: Value, dim: int, dtype: Any) -> Value:
    dims = (dim % max(len(a.shape), 1),)
    product_ = Float(grad) * Float(a)
    return result(product_ - Float(a) * product_.sum(dims), node)


@builder(aten._log_softmax_backward_data.default)
def _log_softmax_backward(node: Node, grad: Value, a: Value, dim: int, dtype: Any) -> Value:
    dims = (dim % max(len(a.shape), 1),)
    g = Float(grad)
    return result(g - Float(a).op("exp") * g.sum(dims), node)


# --- norms ----------------------------------------------------------------------------------------


def _inner(value: Value, normalised: Any) -> tuple[int, ...]:
    rank = len(value.shape)
    return tuple(range(rank - len(normalised), rank))


@builder(aten.native_layer_norm.default)
def _layer_norm(
    node: Node, a: Value, normalised: Any, weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, ...]:
    metas = node.meta["val"]
    dims = _inner(a, normalised)
    var, mean = (Float(v) for v in variance(a, dims))
    rstd = (var + eps).op("rsqrt")
    out = (Float(a) - mean) * rstd
    out = out * Float(weight) if weight is not None else out
    out = out + Float(bias) if bias is not None else out
    parts = (out.value, mean.value, rstd.value)
    return tuple(shaped(as_dtype(p, m.dtype), m) for p, m in zip(parts, metas, strict=True))


@builder(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    node: Node,
    grad: Value,
    a: Value,
    normalised: Any,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    wanted: Any,
) -> tuple[Value | None, ...]:
    dims = _inner(a, normalised)
    outer = tuple(range(len(a.shape) - len(dims)))
    keep = tuple(1 if dim in dims else size for dim, size in enumerate(a.shape))
    scale = Float(rstd).shape(keep)
    hat = (Float(a) - Float(mean).shape(keep)) * scale
    g = Float(grad)
    scaled = g * Float(weight) if weight is not None else g
    moved = scaled - scaled.mean(dims) - hat * (scaled * hat).mean(dims)
    parts = (
        moved * scale if wanted[0] else None,
        (g * hat).sum(outer) if wanted[1] else None,
        g.sum(outer) if wanted[2] else None,
    )
    return _several(parts, node)


def _several(parts: Any, node: Node) -> tuple[Value | None, ...]:
    """The results of an op that leaves out those that aren't wanted."""
    return tuple(
        None if part is None or meta is None else shaped(as_dtype(part.value, meta.dtype), meta)
        for part, meta in zip(parts, node.meta["val"], strict=True)
    )


if hasattr(aten, "_fused_rms_norm"):

    @builder(aten._fused_rms_norm.default)
    def _rms_norm(
        node: Node, a: Value, normalised: Any, weight: Value | None, eps: float | None
    ) -> tuple[Value | None, ...]:
        dims = _inner(a, normalised)
        x = Float(a)
        # Without one it is the epsilon of the dtype that is computed in.
        eps = torch.finfo(F32).eps if eps is None else eps
        rstd = ((x * x).mean(dims) + eps).op("rsqrt")
        out = x * rstd
        out = out * Float(weight) if weight is not None else out
        return _several((out, rstd), node)

    @builder(aten._fused_rms_norm_backward.default)
    def _rms_norm_backward(
        node: Node,
        grad: Value,
        a: Value,
        normalised: Any,
        rstd: Value,
        weight: Value | None,
        wanted: Any,
    ) -> tuple[Value | None, ...]:
        dims = _inner(a, normalised)
        outer = tuple(range(len(a.shape) - len(dims)))
        keep = tuple(1 if dim in dims else size for dim, size in enumerate(a.shape))
        scale = Float(rstd).shape(keep)
        hat = Float(a) * scale
        g = Float(grad)
        scaled = g * Float(weight) if weight is not None else g
        moved = (scaled - hat * (scaled * hat).mean(dims)) * scale
        parts = (
            moved if wanted[0] else None,
            (g * hat).sum(outer) if wanted[1] and weight is not None else None,
        )
        return _several(parts, node)


# --- losses ---------------------------------------------------------------------------------------


@builder(aten.mse_loss.default)
def _mse_loss(node: Node, a: Value, b: Value, reduction: int = 1) -> Value:
    difference = Float(a) - Float(b)
    squares = difference * difference
    dims = tuple(range(len(squares.value.shape)))
    if reduction == 0:
        return result(squares, node)
    reduced = squares.mean(dims) if reduction == 1 else squares.sum(dims)
    return reshape(result(reduced, node), shape_of(meta_of(node)))


@builder(aten.mse_loss_backward.default)
def _mse_loss_backward(node: Node, grad: Value, a: Value, b: Value, reduction: int) -> Value:
    difference = Float(a) - Float(b)
    factor = 2.0
    if reduction == 1:
        count = product(difference.value.shape)
        if not isinstance(count, int):
            raise Unsupported("a mean over symbolic sizes isn't supported here")
        factor = 2.0 / count if count else math.nan
    return result(factor * difference * Float(grad), node)
