"""ONNX forms of our own, where torch's library has none, a wrong one or a slower one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from fuseboard_onnxruntime import _quantised
from fuseboard_onnxruntime import _simplify as _simplify  # defines an op
from fuseboard_onnxruntime._size_arithmetic import size_arithmetic

aten: Any = torch.ops.aten


@cache
def translations() -> dict[Any, Callable[..., Any]]:
    """Op → function that writes ONNX while it is called with symbolic values."""
    from onnxscript.onnx_opset import opset18 as op

    def sign(self):
        """0 for NaN, as in torch; ONNX's gives NaN."""
        zero = op.CastLike(0.0, self)
        return op.Sub(
            op.CastLike(op.Greater(self, zero), self), op.CastLike(op.Less(self, zero), self)
        )

    def clamp(self, min=None, max=None):
        """Without Clip, whose missing bound is the largest finite number."""
        result = self
        if min is not None:
            result = op.Max(result, op.CastLike(min, self))
        if max is not None:
            result = op.Min(result, op.CastLike(max, self))
        return op.Identity(result) if result is self else result

    def power(self, exponent):
        """Roots are what eager calls: of minus infinity, a power is infinite and a root NaN."""
        if exponent == 0.5:
            return op.Sqrt(self)
        if exponent == -0.5:
            return op.Reciprocal(op.Sqrt(self))
        return op.Pow(self, op.CastLike(exponent, self))

    def batch_norm(input, weight, bias, running_mean, running_var, momentum, eps):
        one = op.CastLike(1.0, input)
        channels = op.Shape(running_mean)
        weight = op.Expand(one, channels) if weight is None else weight
        bias = op.Expand(op.CastLike(0.0, input), channels) if bias is None else bias
        result = op.BatchNormalization(input, weight, bias, running_mean, running_var, epsilon=eps)
        none = op.Expand(one, op.Constant(value_ints=[0]))
        return result, none, op.Identity(none)

    def embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
        return op.Gather(weight, _checked(op, indices))

    def gather(self, dim, index, sparse_grad=False):
        return op.GatherElements(self, _checked(op, index), axis=dim)

    def index_select(self, dim, index):
        return op.Gather(self, _checked(op, index), axis=dim)

    def attention(query, key, value, attn_mask, is_causal, scale, grouped):
        """(N, H, L, E), (N, H, S, E) twice; transposition and scale end up in the product."""
        if grouped:
            key, value = (_for_each_head(op, query, one) for one in (key, value))
        scores = op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2]))
        scores = op.Mul(scores, op.CastLike(scale, query))
        if is_causal:
            scores = op.Add(scores, _causal_mask(op, query, key))
        if attn_mask is not None:
            scores = op.Add(scores, attn_mask)
        result = op.MatMul(op.Softmax(scores, axis=-1), value)
        if attn_mask is None:
            return result
        # Where nothing may be looked at, eager's kernel answers 0, softmax NaN.
        most = op.ReduceMax(attn_mask, op.Constant(value_ints=[-1]), keepdims=1)
        lowest = op.CastLike(op.Constant(value_float=float("-inf")), query)
        return op.Where(op.Equal(most, lowest), op.CastLike(0.0, query), result)

    def max_pool(self, kernel_size, stride=(), padding=(0, 0), dilation=(1, 1), ceil_mode=False):
        """The first result.

        ONNX Runtime's kernel ignores NaN, and begins with the lowest finite number, which it gives
        for nothing but -inf. So the places of both are found apart: 2 marks NaN, 0 marks -inf.
        """
        window = _window(kernel_size, stride, padding, dilation)
        result, *_ = op.MaxPool(self, **window)
        lowest = op.CastLike(float("-inf"), self)
        is_nan = op.CastLike(op.IsNaN(self), self)
        is_higher = op.CastLike(op.Greater(self, lowest), self)
        marks, *_ = op.MaxPool(op.Add(op.Add(is_nan, is_nan), is_higher), **window)
        one = op.CastLike(1.0, self)
        result = op.Where(op.Less(marks, one), lowest, result)
        result = op.Where(op.Greater(marks, one), op.CastLike(float("nan"), self), result)
        return result, op.Cast(result, to=7)

    def max_pool_of_no_negative(
        self, kernel_size, stride=(), padding=(0, 0), dilation=(1, 1), ceil_mode=False
    ):
        """The mean is NaN where an element is: infinities of both signs would do that, too.

        In the layout that ONNX Runtime's convolutions leave behind, unlike a pool of marks.
        """
        window = _window(kernel_size, stride, padding, dilation)
        result, *_ = op.MaxPool(self, **window)
        if max(window.pop("dilations")) > 1:
            return max_pool(self, kernel_size, stride, padding, dilation)[0]
        mean = op.AveragePool(self, **window, count_include_pad=1)
        return op.Where(op.IsNaN(mean), mean, result)

    def layer_norm(input, weight, bias, eps, dims):
        if weight is None:
            weight = op.Expand(op.CastLike(1.0, input), op.Shape(input, start=-dims))
        result, *_ = op.LayerNormalization(input, weight, bias, axis=-dims, epsilon=eps)
        return result

    def rms_norm(input, weight, eps, dims):
        """In the form that ONNX Runtime has one kernel for: by the root, with a weight."""
        axes = list(range(-dims, 0))
        if weight is None:
            shape = op.Shape(input, start=axes[0])
            weight = op.Expand(op.CastLike(1.0, input), shape)
        squares = op.Pow(input, op.CastLike(2.0, input))
        mean = op.ReduceMean(squares, op.Constant(value_ints=axes), keepdims=1)
        root = op.Sqrt(op.Add(mean, op.CastLike(eps, input)))
        return op.Mul(op.Div(input, root), weight)

    def gelu(self, approximate="none"):
        """In the order of operands in which ONNX Runtime knows it as one op."""
        half, one = (op.CastLike(number, self) for number in (0.5, 1.0))
        if approximate == "tanh":
            cube = op.Pow(self, op.CastLike(3.0, self))
            inner = op.Add(self, op.Mul(op.CastLike(0.044715, self), cube))
            inner = op.Tanh(op.Mul(op.CastLike(math.sqrt(2 / math.pi), self), inner))
            return op.Mul(op.Mul(self, half), op.Add(inner, one))
        inner = op.Erf(op.Div(self, op.CastLike(math.sqrt(2), self)))
        return op.Mul(op.Mul(self, op.Add(inner, one)), half)

    def split(self, split_size, dim=0):
        """As slices: ONNX's Split gives a sequence where the number of parts isn't known."""
        size = self.shape[dim]
        count = max(1, -(-int(size) // split_size)) if split_size else 1
        return [_part(op, self, i * split_size, (i + 1) * split_size, dim) for i in range(count)]

    def split_with_sizes(self, split_sizes, dim=0):
        """As slices; torch's decomposition reads memory as if it were row-major."""
        starts: list[Any] = [0]
        for size in split_sizes:
            starts.append(_sum(op, starts[-1], size))
        return [_part(op, self, *both, dim) for both in pairwise(starts)]

    def unbind(self, dim=0):
        count = int(self.shape[dim])
        return [op.Gather(self, op.Constant(value_int=i), axis=dim) for i in range(count)]

    def quantize(input, scale, zero_point, quant_min, quant_max, dtype):
        zero = op.Cast(op.Constant(value_int=zero_point), to=dtype)
        result = op.QuantizeLinear(input, op.Constant(value_float=scale), zero)
        if (quant_min, quant_max) in ((0, 255), (-128, 127)):
            return result
        limits = (op.Constant(value_int=limit) for limit in (quant_min, quant_max))
        return op.Clip(result, *(op.Cast(limit, to=dtype) for limit in limits))

    def dequantize(input, scale, zero_point, quant_min, quant_max, dtype):
        zero = op.Cast(op.Constant(value_int=zero_point), to=dtype)
        return op.DequantizeLinear(input, op.Constant(value_float=scale), zero)

    def dequantize_channels(input, scales, zero_points, axis, quant_min, quant_max, dtype):
        return op.DequantizeLinear(input, scales, op.Cast(zero_points, to=dtype), axis=axis)

    def integer_product(x, scale, zero_point, weight, scales, zero_points):
        zero = op.Cast(op.Constant(value_int=zero_point), to=x.dtype)
        zeros = op.Cast(zero_points, to=weight.dtype)
        sums = op.MatMulInteger(x, op.Transpose(weight, perm=[1, 0]), zero, zeros)
        factor = op.Mul(op.Constant(value_float=scale), scales)
        return op.Mul(op.Cast(sums, to=1), factor)

    def sym_numel(self):
        return op.Size(self)

    return {
        **size_arithmetic(op),
        aten.sym_numel.default: sym_numel,
        aten.split.Tensor: split,
        aten.split_with_sizes.default: split_with_sizes,
        aten.unbind.int: unbind,
        aten.gelu.default: gelu,
        aten.max_pool2d_with_indices.default: max_pool,
        aten.max_pool2d.default: max_pool_of_no_negative,
        torch.ops.fuseboard_onnxruntime.attention.default: attention,
        torch.ops.fuseboard_onnxruntime.layer_norm.default: layer_norm,
        torch.ops.fuseboard_onnxruntime.rms_norm.default: rms_norm,
        torch.ops.fuseboard_onnxruntime.integer_product.default: integer_product,
        **dict(zip(_quantised.ops(), (quantize, dequantize, dequantize_channels), strict=False)),
        aten.sign.default: sign,
        aten.clamp.default: clamp,
        aten.clamp_min.default: clamp,
        aten.clamp_max.default: lambda self, max: clamp(self, max=max),
        aten.pow.Tensor_Scalar: power,
        aten._native_batch_norm_legit_no_training.default: batch_norm,
        aten.embedding.default: embedding,
        aten.gather.default: gather,
        aten.index_select.default: index_select,
    }


def _for_each_head(op: Any, query: Any, value: Any) -> Any:
    """(N, G, S, E) with each head once for each of the query's that share it: (N, H, S, E)."""

    def sizes(of: Any, start: int, end: int) -> Any:
        return op.Shape(of, start=start, end=end)

    times = op.Div(sizes(query, 1, 2), sizes(value, 1, 2))
    apart = op.Unsqueeze(value, op.Constant(value_ints=[2]))
    repeated = op.Expand(apart, op.Concat(sizes(value, 0, 2), times, sizes(value, 2, 4), axis=0))
    joined = op.Concat(sizes(value, 0, 1), sizes(query, 1, 2), sizes(value, 2, 4), axis=0)
    return op.Reshape(repeated, joined)


def _causal_mask(op: Any, query: Any, key: Any) -> Any:
    """0 where a position may look, minus infinity where not; folded where sizes are known."""

    def positions(value: Any) -> Any:
        count = op.Squeeze(op.Shape(value, start=2, end=3), op.Constant(value_ints=[0]))
        return op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1))

    rows = op.Unsqueeze(positions(query), op.Constant(value_ints=[1]))
    later = op.Greater(positions(key), rows)
    nothing = op.CastLike(op.Constant(value_float=0.0), query)
    return op.Where(later, op.CastLike(op.Constant(value_float=float("-inf")), query), nothing)


def _part(op: Any, value: Any, start: Any, end: Any, dim: int) -> Any:
    return op.Slice(value, *(_vector(op, place) for place in (start, end, dim)))


def _vector(op: Any, number: Any) -> Any:
    """A number, or a value without dimensions, as a vector of one."""
    one = op.Constant(value_ints=[number if isinstance(number, int) else 1])
    return one if isinstance(number, int) else op.Reshape(number, one)


def _sum(op: Any, left: Any, right: Any) -> Any:
    """Of two sizes, numbers as far as they are known."""
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    return op.Add(*(op.Constant(value_int=x) if isinstance(x, int) else x for x in (left, right)))


def _window(kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> dict[str, list[int]]:
    return {
        "kernel_shape": _both(kernel_size),
        "strides": _both(stride or kernel_size),
        "pads": [*_both(padding), *_both(padding)],
        "dilations": _both(dilation),
    }


def _both(value: Any) -> list[int]:
    """A number for each of two dimensions."""
    return list(value) * (2 if len(value) == 1 else 1)


def _checked(op: Any, index: Any) -> Any:
    """Negative indices raise in eager and count from the end in ONNX: made too large."""
    index = op.Cast(index, to=7)
    return op.Where(op.Less(index, 0), op.Constant(value_int=2**62), index)
