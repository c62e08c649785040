"""PT2E's quantised ops in float64, which they themselves refuse or round to float32.

Integers are what a graph means, so they stay; what is rounded to them, and what they stand for, is
computed in float64. Read against torch 2.13: ``torch/ao/quantization/fx/_decomposed.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def in_float64(target: Any) -> Callable[..., Any] | None:
    """A function of lifted arguments that stands for an op; None where the op does itself."""
    if getattr(target, "namespace", "") != "quantized_decomposed":
        return None
    return _FUNCTIONS.get(target._schema.name.partition("::")[2])


def _quantise(
    x: torch.Tensor, scale: Any, zero_point: Any, low: Any, high: Any, dtype: torch.dtype
) -> Any:
    return ((x / scale).round() + zero_point).clamp(low, high).to(dtype)


def _dequantise(held: torch.Tensor, scale: Any, zero_point: Any) -> Any:
    return (held.to(torch.float64) - zero_point) * scale


def _dequantise_values(
    held: torch.Tensor, scale: Any, zero_point: Any, *grid: Any, **to: Any
) -> Any:
    """What the integers' range is and the dtype of the result make no difference here."""
    return _dequantise(held, scale, zero_point)


def _quantise_channels(
    x: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, axis: int, *grid: Any
) -> Any:
    return _quantise(x, _along(x, axis, scales), _along(x, axis, zero_points), *grid)


def _dequantise_channels(
    held: torch.Tensor, scales: torch.Tensor, zero_points: Any, axis: int, *grid: Any, **to: Any
) -> Any:
    zero_points = 0 if zero_points is None else _along(held, axis, zero_points)
    return _dequantise(held, _along(held, axis, scales), zero_points)


def _along(x: torch.Tensor, axis: int, values: torch.Tensor) -> torch.Tensor:
    """A vector as a tensor that goes along one dimension of another."""
    shape = [1] * x.dim()
    shape[axis] = -1
    return values.view(shape)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "quantize_per_tensor": _quantise,
    "quantize_per_channel": _quantise_channels,
    "dequantize_per_tensor": _dequantise_values,
    "dequantize_per_channel": _dequantise_channels,
}
