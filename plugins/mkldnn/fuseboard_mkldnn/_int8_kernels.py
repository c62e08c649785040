"""What int8 code calls: oneDNN's products with what is folded into them, and what lies between.

torch's operators are ``onednn::qlinear_pointwise`` and ``onednn::qconv_pointwise`` (read:
``torch/_inductor/fx_passes/quantization.py`` and ``torch/_inductor/mkldnn_lowerings.py`` of 2.13).
Sums are exact, in 32 bits; scales, bias, post-operation and rounding follow in float32.

Without VNNI, oneDNN adds pairs of products u8 * s8 in 16 bits, and what doesn't fit is cut off
(https://oneapi-src.github.io/oneDNN/dev_guide_int8_computations.html). Numbers of up to 128 always
fit: 128 * (127 + 127) and 128 * (-128 - 128). So numbers of up to 255 are written there as the sum
of two *halves* of up to 128, each multiplied by itself. That keeps one weight of 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

#: A number and its zero point are tensors of one element where they are known only in a call.
Number = float | torch.Tensor

#: The largest activation of which no pair of products is cut off.
LARGEST_HALF = 128

_onednn: Any = torch.ops.onednn


# --- made once for a weight -----------------------------------------------------------------------


def packed_linear(weight: torch.Tensor, rows: int | None, width: int) -> torch.Tensor:
    """A weight (N, K) as the product wants it.

    ``qlinear_prepack`` reads memory as if it were contiguous, whatever the strides are
    (``pack_weight_to_onednn_tensor`` in ``aten/src/ATen/native/quantized/cpu/qlinear_prepack.cpp``
    of torch 2.13), and so takes a weight that is stored (K, N) for another one.
    """
    weight = weight.contiguous()
    return _onednn.qlinear_prepack(weight, None if rows is None else [rows, width])  # type: ignore[no-any-return]


def packed_convolution(
    weight: torch.Tensor, scales: torch.Tensor, scale: float, zero_point: int, *numbers: Any
) -> torch.Tensor:
    """A weight (O, I/groups, H, W) as the convolution wants it.

    :param numbers: stride, padding, dilation, groups, the sizes of the input.
    """
    return _onednn.qconv_prepack(weight, scales, scale, zero_point, *numbers)  # type: ignore[no-any-return]


def weight_scales(weight: torch.Tensor, scales: Number) -> torch.Tensor:
    """One scale, or one for each channel of the result, in float32."""
    if not isinstance(scales, torch.Tensor):
        scales = torch.tensor([scales])
    scales = scales.to(torch.float32).contiguous()
    if not scales.isfinite().all():
        raise ValueError("scales of a weight that aren't finite: not for oneDNN's int8 kernels")
    return scales


def weight_zero_points(scales: torch.Tensor, zero_points: torch.Tensor | None) -> torch.Tensor:
    """Zeros: oneDNN's kernels take no others.

    :raises ValueError: the weight has others.
    """
    if zero_points is not None and zero_points.any():
        raise ValueError("zero points of a weight other than 0: not for oneDNN's int8 kernels")
    return torch.zeros(scales.shape, dtype=torch.int32)


def finite_bias(bias: torch.Tensor) -> torch.Tensor:
    """The bias itself: oneDNN's relu would answer 0 for NaN.

    :raises ValueError: it holds NaN or infinities.
    """
    if not bias.isfinite().all():
        raise ValueError("a bias that isn't finite: not for oneDNN's int8 kernels")
    return bias.clone()


# --- products -------------------------------------------------------------------------------------


def linear(
    x: torch.Tensor,
    scale: Number,
    zero_point: Number,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    post: tuple[str, Sequence[float], str],
    halves: bool,
    result: tuple[float, int, torch.dtype] | None = None,
) -> torch.Tensor:
    """A linear layer of integers (..., K), a packed weight and a float32 bias (N,).

    :param residual: float32 of the result's shape, added before the post-operation.
    :param post: oneDNN's name, scalars and algorithm; after a residual ``relu`` or ``none``.
    :param halves: the product is cut off here if it is made at once.
    :param result: scale, zero point and dtype of an integer result; None for float32.
    """
    product = _onednn.qlinear_pointwise
    known = not isinstance(scale, torch.Tensor)
    unary, binary = (
        (product.default, product.binary) if known else (product.tensor, product.binary_tensor)
    )
    if halves:
        x, zero_point = _unsigned(x, zero_point)
        low, x = _halved(x)
        weights = (weight, scales, zeros)
        part = unary(low, scale, zero_point, *weights, bias, *_FLOAT, *_NOTHING)
        residual = part if residual is None else part.add_(residual)
        bias, zero_point = None, 0 if known else torch.zeros_like(zero_point)  # type: ignore[arg-type]
        if post[0] not in _AFTER_SUMS:
            total = binary(
                *(x, scale, zero_point, *weights, residual, None),
                *(*_FLOAT, 1.0, 0, "add", 1.0, *_NOTHING),
            )
            return _finished(total, post, result)
    numbers = _FLOAT if result is None else result
    if residual is None:
        return unary(x, scale, zero_point, weight, scales, zeros, bias, *numbers, *post)  # type: ignore[no-any-return]
    return binary(  # type: ignore[no-any-return]
        *(x, scale, zero_point, weight, scales, zeros, residual, bias),
        *(*numbers, 1.0, 0, "add", 1.0, *post),
    )


def convolution(
    x: torch.Tensor,
    scale: float,
    zero_point: int,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    held: tuple[float, int] | None,
    numbers: tuple[Any, ...],
    post: tuple[str, Sequence[float], str],
    halves: bool,
    result: tuple[float, int, torch.dtype] | None = None,
) -> torch.Tensor:
    """A 2-D convolution of integers (N, C, H, W); the result lies channels-last.

    :param residual: of the result's shape, added before the post-operation; isn't written to.
    :param held: its scale and zero point where it is uint8; None where it is float32.
    :param numbers: stride, padding, dilation, groups.
    :param post: as :func:`linear` has it.
    """
    x, zero_point = _unsigned(x, zero_point)  # type: ignore[assignment]
    weights = (weight, scales, zeros)
    unary, binary = _onednn.qconv_pointwise.default, _onednn.qconv2d_pointwise.binary
    if halves:
        low, x = _halved(x)
        total = unary(low, scale, zero_point, *weights, bias, *numbers, *_FLOAT, *_NOTHING)
        if residual is not None:
            total.add_(residual if held is None else dequantised(residual, *held))
        inside = post if post[0] in _AFTER_SUMS else _NOTHING
        total = binary(x, scale, 0, *weights, total, None, *numbers, *_FLOAT, *_SUM, *inside)
        return _finished(total, _NOTHING if inside is post else post, result)
    if residual is None:
        after = _FLOAT if result is None else result
        return unary(x, scale, zero_point, *weights, bias, *numbers, *after, *post)  # type: ignore[no-any-return]
    if held is None or result is None or result[2] != residual.dtype:
        total = residual if held is None else dequantised(residual, *held)
        total = _channels_last(total, held is None)
        total = binary(x, scale, zero_point, *weights, total, bias, *numbers, *_FLOAT, *_SUM, *post)
        return total if result is None else quantised(total, *result)
    total = _channels_last(residual, True)
    return binary(  # type: ignore[no-any-return]
        *(x, scale, zero_point, *weights, total, bias, *numbers, *result),
        *(*held, "sum", 1.0, *post),
    )


_NOTHING: tuple[str, Sequence[float], str] = ("none", [], "")
_FLOAT = (1.0, 0, torch.float32)
_SUM = (1.0, 0, "sum", 1.0)

#: Post-operations that the operators take after a sum.
_AFTER_SUMS = ("none", "relu")


def _unsigned(x: torch.Tensor, zero_point: Any) -> tuple[torch.Tensor, Any]:
    """The same numbers as uint8: those of int8 without VNNI take oneDNN 30 times as long."""
    if x.dtype == torch.uint8:
        return x, zero_point
    return x.view(torch.uint8).bitwise_xor(128), zero_point + 128


def _halved(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two summands of up to :data:`LARGEST_HALF`."""
    low = x.clamp_max(LARGEST_HALF)
    return low, x - low


def _channels_last(x: torch.Tensor, copied: bool) -> torch.Tensor:
    if x.is_contiguous(memory_format=torch.channels_last):
        return x.clone() if copied else x
    return x.contiguous(memory_format=torch.channels_last)


def _finished(
    total: torch.Tensor,
    post: tuple[str, Sequence[float], str],
    result: tuple[float, int, torch.dtype] | None,
) -> torch.Tensor:
    """A float32 sum with its post-operation, rounded where that is wanted."""
    name, scalars, algorithm = post
    functions = torch._C._nn
    if name == "relu":
        total.relu_()
    elif name == "gelu":
        functions.gelu_(total, approximate=algorithm)
    elif name == "swish":
        functions.silu_(total)
    elif name == "hardswish":
        functions.hardswish_(total)
    elif name == "hardtanh":
        total.clamp_(*scalars)
    elif name == "leaky_relu":
        functions.leaky_relu_(total, *scalars)
    elif name == "tanh":
        total.tanh_()
    return total if result is None else quantised(total, *result)


# --- between products -----------------------------------------------------------------------------


def quantised(x: torch.Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the region's own, which is written over, as integers of a dtype's whole range."""
    limits = torch.iinfo(dtype)
    return x.mul_(1.0 / scale).round_().add_(zero_point).clamp_(limits.min, limits.max).to(dtype)


def quantise(
    x: torch.Tensor, scale: Any, zero_point: Any, low: int, high: int, dtype: torch.dtype
) -> torch.Tensor:
    """``quantized_decomposed::quantize_per_tensor`` without the memory that each of its ops takes.

    The same numbers bit by bit, of float32.
    """
    if isinstance(scale, torch.Tensor):
        scale, zero_point = scale.item(), zero_point.item()
    return (x * (1.0 / scale)).round_().add_(zero_point).clamp_(low, high).to(dtype)


def dequantised(x: torch.Tensor, scale: Any, zero_point: Any) -> torch.Tensor:
    """``quantized_decomposed::dequantize_per_tensor``, in the same way."""
    if isinstance(scale, torch.Tensor):
        scale, zero_point = scale.item(), zero_point.item()
    return x.to(torch.float32).sub_(zero_point).mul_(scale)
