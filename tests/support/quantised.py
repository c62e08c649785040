"""Models as PT2E writes them: floats rounded to integers and back around ordinary ops.

``convert_pt2e`` of torchao makes such graphs of ``torch.ops.quantized_decomposed``; here they are
written by hand, so that tests need no torchao. Each model can also be run in float64, with the same
integers meant (:meth:`Quantised.wide`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # defines the ops
from torch import nn

from tests.support.values import rnd

ops = torch.ops.quantized_decomposed
UNSIGNED = (0, 255, torch.uint8)
#: What fits where pairs of products are added in 16 bits.
REDUCED = (0, 127, torch.uint8)
SIGNED = (-128, 127, torch.int8)
Grid = tuple[float, int, int, int, torch.dtype]


class Quantised(nn.Module):
    """A model that can run in float64: its roundings then divide and round there.

    :ivar exact: it does.
    """

    exact = False

    def wide(self) -> Quantised:
        """A copy in float64; integers stay."""
        twin = copy.deepcopy(self).double()
        for module in twin.modules():
            module.exact = True
        return twin

    def rounded(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Quantise per tensor."""
        scale, zero_point, low, high, dtype = grid
        if self.exact:
            return ((x / scale).round() + zero_point).clamp(low, high).to(dtype)
        return ops.quantize_per_tensor.default(x, *grid)  # type: ignore[no-any-return]

    def widened(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Dequantise per tensor."""
        if self.exact:
            return (x.double() - grid[1]) * grid[0]
        return ops.dequantize_per_tensor.default(x, *grid)  # type: ignore[no-any-return]

    def both(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Round to a grid, as floats."""
        return self.widened(self.rounded(x, grid), grid)

    def dynamic(self, x: torch.Tensor) -> torch.Tensor:
        """Round to a grid that is chosen by the values."""
        scale, zero_point = ops.choose_qparams.tensor(x.float(), 0, 255, 2.0**-12, torch.uint8)
        if self.exact:
            return self.both(x, (scale.item(), int(zero_point.item()), *UNSIGNED))
        held = ops.quantize_per_tensor.tensor(x, scale, zero_point, *UNSIGNED)
        return ops.dequantize_per_tensor.tensor(held, scale, zero_point, *UNSIGNED)  # type: ignore[no-any-return]


class Weight(Quantised):
    """A weight in int8, with a scale for each of its first dimension."""

    def __init__(self, *shape: int, seed: int = 0) -> None:
        super().__init__()
        floats = rnd(*shape, seed=seed)
        scales = floats.abs().flatten(1).amax(1) / 127
        held = (floats / scales.view(-1, *[1] * (len(shape) - 1))).round().clamp(-128, 127)
        self.register_buffer("held", held.to(torch.int8))
        self.register_buffer("scales", scales)
        self.register_buffer("zero_points", torch.zeros(shape[0], dtype=torch.int64))

    def forward(self) -> torch.Tensor:
        if self.exact:
            ones = [1] * (self.held.dim() - 1)
            held = self.held.double() - self.zero_points.view(-1, *ones)
            return held * self.scales.view(-1, *ones)
        return ops.dequantize_per_channel.default(  # type: ignore[no-any-return]
            self.held, self.scales, self.zero_points, 0, *SIGNED
        )


class Linear(Quantised):
    """A linear layer of int8 numbers.

    :param grid: of its input; None chooses one in each call.
    """

    def __init__(self, k: int, n: int, grid: Grid | None, bias: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.weight, self.grid = Weight(n, k, seed=seed), grid
        self.bias = nn.Parameter(rnd(n, seed=seed + 50)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dynamic(x) if self.grid is None else self.both(x, self.grid)
        return nn.functional.linear(x, self.weight(), self.bias)


class Convolution(Quantised):
    """A 2-D convolution of int8 numbers that are given as integers, or are rounded here."""

    def __init__(
        self, channels: int, results: int, size: int, grid: Grid, seed: int = 0, **numbers: Any
    ) -> None:
        super().__init__()
        groups = numbers.get("groups", 1)
        self.weight = Weight(results, channels // groups, size, size, seed=seed)
        self.bias = nn.Parameter(rnd(results, seed=seed + 50))
        self.grid, self.numbers = grid, numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.both(x, self.grid)
        return nn.functional.conv2d(x, self.weight(), self.bias, **self.numbers)
