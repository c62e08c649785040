"""Quantised graphs on ONNX Runtime: products of integers, and the values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.backends import compiled, last_graph
from tests.support.quantised import (
    REDUCED,
    SIGNED,
    UNSIGNED,
    Convolution,
    Grid,
    Linear,
    Quantised,
)
from tests.support.values import assert_closer, rnd, strides

pytest.importorskip("onnxruntime", reason="needs the extra onnxruntime")

X: Grid = (0.03, 120, *UNSIGNED)
H: Grid = (0.04, 7, *UNSIGNED)
OPTIONS = {"on_failure": "raise", "verify": "always", "min_region_us": 0}


class Layers(Quantised):
    """Two linear layers and what rounds their results."""

    def __init__(self, given: Grid = X, between: Grid = H) -> None:
        super().__init__()
        self.first, self.second = Linear(37, 50, given), Linear(50, 19, between, seed=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.gelu(self.first(x)))


class Convolutions(Quantised):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Convolution(8, 16, 3, X, padding=1)
        self.second = Convolution(16, 4, 3, H, seed=1, stride=2)
        self.last = Linear(4 * 4 * 3, 7, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.flatten(torch.relu(self.second(self.first(x))), 1))


def run(model: Quantised, x: torch.Tensor) -> list[str]:
    """Hold the result against eager's and float64's; the notes of the region."""
    with torch.no_grad():
        result = compiled(model, "onnxruntime", "eager", **OPTIONS)(x)
        rival = model(x)
        assert strides(result) == strides(rival)
        if result.is_floating_point():
            assert_closer(result, reference=model.wide()(x.double()), rival=rival)
        else:
            assert torch.equal(result, rival)
    (region,) = last_graph().regions
    assert region.backend == "onnxruntime"
    return region.notes


@pytest.mark.parametrize("shape", [(5, 37), (2, 3, 37)])
@pytest.mark.parametrize("grid", [X, (0.03, 60, *REDUCED), (0.03, -8, *SIGNED)])
def test_linear_layers_are_products_of_integers(grid, shape):
    """Of each range, signed and not; nothing is cut off."""
    assert run(Layers(grid, (0.02, grid[1] // 2, *grid[2:])), 2 * rnd(*shape)) == [
        "products of integers ×2"
    ]


def test_zero_points_of_a_weight():
    """Each channel has its own."""
    model = Layers()
    model.first.weight.zero_points.copy_(torch.arange(50) - 25)
    assert run(model, rnd(5, 37)) == ["products of integers ×2"]


def test_convolutions_are_as_exact_as_eager():
    """They run in float32, with the linear layer after them on integers."""
    assert run(Convolutions(), rnd(2, 8, 10, 8)) == ["products of integers ×1"]


def test_integers_as_results():
    """A region may give and take integers."""

    class Rounded(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rounded(super().forward(x), (0.1, 3, *SIGNED))

    run(Rounded(), rnd(5, 37))


def test_a_float_input_is_no_product_of_integers():
    """A weight alone in integers is dequantised."""

    class WeightOnly(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight(), self.bias)

    assert run(WeightOnly(37, 19, X), rnd(5, 37)) == []


def test_a_scale_that_is_chosen_in_each_call_is_declined():
    """Dynamic quantisation has no form here."""
    model, x = Linear(37, 19, None), rnd(5, 37)
    with torch.no_grad():
        compiled(model, "onnxruntime", "eager", **OPTIONS)(x)
    assert any(region.backend == "eager" for region in last_graph().regions)
