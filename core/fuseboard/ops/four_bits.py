"""``fuseboard::pack_in_4_bits``: a weight in groups of 16 steps, for ATen's kernel on CPUs.

``aten::_weight_int4pack_mm_for_cpu`` multiplies by ``(number - 8) * scale + zero``, with numbers
from 0 to 15 and a bfloat16 scale and zero for each group of a row. Where the weight came from such
numbers, as one that was read from a GGUF file does, they are found again: either the smallest and
the largest element are the ends of a group's grid (GGUF's Q4_1), or the one that is further from 0
is its end and 0 is on it (Q4_0). Of the two the one with the smaller error is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten

#: Elements of a row that share a scale: the fewest that the kernel knows, and those of GGUF.
GROUP = 32
#: What the kernel has to divide the rows by on any CPU.
ROWS_MULTIPLE = 64

_STEPS, _MIDDLE = 15, 8
#: Rows that are rounded at a time: the weight of a last layer takes a hundred megabytes.
_ROWS_AT_ONCE = 4096


@torch.library.custom_op("fuseboard::pack_in_4_bits", mutates_args=(), device_types="cpu")
def _pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight and lay it out for the kernel.

    :param weight: float32, ``(N, K)``; N a multiple of ``ROWS_MULTIPLE``, K of ``GROUP``.
    :returns: the numbers, ``(N, K / 2)`` bytes, and scales and zeros, ``(K / GROUP, N, 2)``.
    """
    numbers = torch.empty(weight.shape, dtype=torch.int32)
    scales = torch.empty(weight.shape[1] // GROUP, len(weight), 2, dtype=torch.bfloat16)
    for start in range(0, len(weight), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        some = weight[rows]
        found, scale, zero = _rounded(some.reshape(len(some), -1, GROUP))
        numbers[rows] = found.view(some.shape)
        scales[:, rows] = torch.stack([scale, zero], -1).transpose(0, 1)
    return aten._convert_weight_to_int4pack_for_cpu(numbers, 1), scales


def _rounded(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers ``(N, G, GROUP)``, scales and zeros ``(N, G)``, by the better grid of each group."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    between = (high - low) / _STEPS
    end = torch.where(high > -low, high, low)
    grids = [(end / -_MIDDLE, torch.zeros_like(end)), (between, low + _MIDDLE * between)]
    tried = [_on_grid(groups, *grid) for grid in grids]
    errors = [((made - groups) ** 2).sum(-1, keepdim=True) for _, made in tried]
    is_second = errors[1] < errors[0]
    numbers = torch.where(is_second, tried[1][0], tried[0][0])
    scale, zero = (torch.where(is_second, grids[1][i], grids[0][i])[..., 0] for i in range(2))
    return numbers, scale, zero


def _on_grid(groups: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest numbers, and what they stand for. What isn't finite makes its group's scale so,
    and with it all that is computed from it, so that its number doesn't matter."""
    steps = ((groups - zero) / torch.where(scale == 0, 1.0, scale)).round() + _MIDDLE
    numbers = steps.nan_to_num(0.0).clamp(0, _STEPS)
    return numbers, (numbers - _MIDDLE) * scale + zero


def _fake(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    packed = weight.new_empty((rows, columns // 2), dtype=torch.uint8)
    return packed, weight.new_empty((columns // GROUP, rows, 2), dtype=torch.bfloat16)


_pack.register_fake(_fake)
pack_in_4_bits = torch.ops.fuseboard.pack_in_4_bits.default
