"""Quantised linear layers and convolutions in int8: what is taken, what isn't, and the values."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from fuseboard_mkldnn import _ops
from tests.support.backends import all_trips, compiled, last_graph
from tests.support.quantised import (
    REDUCED,
    SIGNED,
    UNSIGNED,
    Convolution,
    Grid,
    Linear,
    Quantised,
    ops,
)
from tests.support.values import assert_closer, rnd, strides

pytestmark = pytest.mark.skipif(not _ops.has_int8(), reason="needs oneDNN's int8 operators")

X: Grid = (0.03, 120, *UNSIGNED)
H: Grid = (0.04, 7, *UNSIGNED)


def run(model: Quantised, *inputs: torch.Tensor, strict: bool = True) -> torch.Tensor:
    """The result through mkldnn, held against eager's and float64's."""
    before = [x.clone() for x in inputs]
    options: dict[str, Any] = {"on_failure": "raise"} if strict else {}
    with torch.no_grad():
        result = compiled(model, "mkldnn", "eager", **options)(*inputs)
        rival = model(*inputs)
        reference = model.wide()(*[x.double() for x in inputs])
    assert strides(result) == strides(rival)
    assert all(map(torch.equal, inputs, before))
    if result.is_floating_point():
        assert_closer(result, reference=reference, rival=rival)
    else:
        assert result.dtype == rival.dtype
        steps = (result.int() - rival.int()).abs()
        assert int(steps.max()) <= 1
        assert float((steps > 0).float().mean()) <= 1e-3
    return result


def fusions() -> list[str]:
    return [fusion.name for region in last_graph().regions for fusion in region.fusions]


def notes() -> list[str]:
    return [note for region in last_graph().regions for note in region.notes]


# --- linear layers --------------------------------------------------------------------------------


class Layers(Quantised):
    """Two linear layers with something between."""

    def __init__(
        self, between: nn.Module, grids: tuple[Grid | None, Grid | None] = (X, H), bias: bool = True
    ) -> None:
        super().__init__()
        self.first = Linear(37, 50, grids[0], bias)
        self.between = between
        self.second = Linear(50, 19, grids[1], bias, seed=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))


POST_OPS = {
    "relu": nn.ReLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "hardswish": nn.Hardswish(),
    "hardtanh": nn.Hardtanh(-0.5, 2.0),
}


@pytest.mark.parametrize("shape", [(5, 37), (2, 3, 37), (1, 37)])
@pytest.mark.parametrize("name", POST_OPS)
def test_a_post_operation_is_inside_and_its_result_is_int8(name, shape):
    """Each op after a quantised layer is taken in, with the rounding that follows it."""
    run(Layers(POST_OPS[name]), rnd(*shape))
    assert fusions() == [f"int8 linear+bias+{name}", "int8 linear+bias"]
    assert notes() == ["results of int8 products: 1 of 2 in int8"]


@pytest.mark.parametrize("grid", [(0.03, 120, *REDUCED), (0.03, -8, *SIGNED)])
@pytest.mark.whole
def test_grids_of_other_ranges(grid):
    """Signed integers, and ranges that are narrower than their dtype, which cut off as in eager."""
    run(Layers(nn.ReLU(), (grid, (0.01, grid[1] // 2, *grid[2:]))), 2 * rnd(33, 37))
    assert notes() == ["results of int8 products: 1 of 2 in int8"]


def test_scales_that_are_chosen_in_each_call():
    """Dynamic quantisation runs in int8; its result isn't rounded before its scale is known."""
    run(Layers(nn.GELU(), (None, None)), rnd(2, 3, 37))
    assert fusions() == ["int8 linear+bias+gelu", "int8 linear+bias"]
    assert notes() == ["results of int8 products: 0 of 2 in int8"]


def test_sums_at_the_end_of_the_range_are_exact():
    """Where the CPU adds pairs of products in 16 bits, nothing is cut off."""
    model = Linear(64, 8, (1.0, 0, *UNSIGNED), bias=False)
    model.weight.held.fill_(127)
    model.weight.held[::2] = -128
    x = torch.full((3, 64), 255.0)
    x[1] = 129.0
    model.weight.scales.fill_(1.0)
    with torch.no_grad():
        result = compiled(model, "mkldnn", "eager", on_failure="raise")(x)
    assert torch.equal(result.double(), model.wide()(x.double()))
    assert fusions() == ["int8 linear"]


def test_symbolic_sizes():
    """One compiled region serves other numbers of rows."""
    model = Layers(nn.ReLU())
    fn = compiled(model, "mkldnn", "eager", dynamic=True, on_failure="raise")
    with torch.no_grad():
        for rows in (5, 9, 64):
            x = rnd(rows, 37)
            assert_closer(fn(x), reference=model.wide()(x.double()), rival=model(x))
    assert fusions() == ["int8 linear+bias+relu", "int8 linear+bias"]


class Residual(Quantised):
    """A layer whose result is added to something, with relu after that."""

    def __init__(self, rounded: bool) -> None:
        super().__init__()
        self.linear, self.rounded_first = Linear(24, 24, X), rounded

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y = self.both(y, H) if self.rounded_first else y
        return torch.relu(self.linear(x) + y)


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.whole
def test_a_residual_is_inside(rounded):
    """A sum with a residual, and relu after it."""
    run(Residual(rounded), rnd(7, 24), rnd(7, 24, seed=1))
    assert fusions() == ["int8 linear+bias+add+relu"]


def test_nan_of_a_residual_is_kept():
    """oneDNN's relu answers 0 for NaN, so it isn't asked where a residual may hold one."""
    model, y = Residual(False), rnd(7, 24, seed=1)
    y[2, 3] = torch.nan
    with torch.no_grad():
        result = compiled(model, "mkldnn", "eager", on_failure="raise")(rnd(7, 24), y)
    assert result[2, 3].isnan()
    assert int(result.isnan().sum()) == 1


# --- what isn't taken -----------------------------------------------------------------------------


class OneScale(Quantised):
    """A weight with one scale and one zero point."""

    def __init__(self, zero_point: int) -> None:
        super().__init__()
        self.register_buffer("held", torch.arange(-90, 90, dtype=torch.int8).view(12, 15))
        self.zero_point = zero_point

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.widened(self.held, (0.02, self.zero_point, *SIGNED))
        return nn.functional.linear(self.both(x, X), weight)


@pytest.mark.parametrize("zero_point", [0, 3])
@pytest.mark.whole
def test_one_scale_for_a_weight(zero_point):
    """One scale is as good as several; a zero point isn't, since oneDNN has none."""
    run(OneScale(zero_point), rnd(5, 15))
    assert fusions() == (["int8 linear"] if zero_point == 0 else [])


def test_zero_points_that_only_the_weight_tells():
    """A weight that turns out to have zero points isn't run in int8, and the values are right."""
    model = Layers(nn.ReLU())
    model.first.weight.zero_points[3] = 5
    run(model, rnd(5, 37), strict=False)
    assert any("zero points" in trip.error for trip in all_trips())


def test_floats_that_were_not_rounded_are_not_int8():
    """A layer whose input is float32 isn't a product of integers."""

    class WeightOnly(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight(), self.bias)

    run(WeightOnly(37, 19, X), rnd(5, 37))
    assert not any("int8" in name for name in fusions())


def test_a_scale_for_each_input_channel_is_not_taken():
    """oneDNN's scales are those of the result's channels."""

    class Other(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight.held.t().contiguous()
            scales, zeros = self.weight.scales, self.weight.zero_points
            if self.exact:
                return self.both(x, X) @ (weight.double() * scales).t()
            return (
                self.both(x, X)
                @ ops.dequantize_per_channel.default(weight, scales, zeros, 1, *SIGNED).t()
            )

    run(Other(37, 37, X, bias=False), rnd(5, 37))
    assert fusions() == []


# --- convolutions ---------------------------------------------------------------------------------


class Convolutions(Quantised):
    """A residual block, pools and a linear layer, with integers all along."""

    def __init__(self, grid: Grid = H) -> None:
        super().__init__()
        self.first = Convolution(3, 8, 3, X, padding=1, stride=2)
        self.second = Convolution(8, 8, 3, grid, seed=1, padding=1)
        self.third = Convolution(8, 12, 1, grid, seed=2)
        self.last = Linear(12 * 5 * 3, 7, grid)
        self.grid = grid

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = nn.functional.max_pool2d(x, 3, 2, 1)
        x = self.both(x, self.grid)
        x = torch.relu(self.second(x) + x)
        x = nn.functional.hardtanh(self.third(x), 0.0, 6.0)
        return self.last(torch.flatten(self.both(x, self.grid), 1))


@pytest.mark.parametrize("grid", [H, (0.04, 7, *REDUCED)])
def test_a_convolutional_net_stays_in_int8(grid):
    """Convolutions, a residual, a pool and a flattening hold integers from end to end."""
    run(Convolutions(grid), rnd(2, 3, 20, 12))
    assert sorted(fusions()) == [
        "int8 conv+add+relu",
        "int8 conv+hardtanh",
        "int8 conv+relu",
        "int8 linear+bias",
    ]
    assert notes() == ["results of int8 products: 3 of 4 in int8"]


@pytest.mark.parametrize("grid", [X, (0.03, -8, *SIGNED)])
@pytest.mark.parametrize("numbers", [{"groups": 4}, {"groups": 8, "padding": 2, "dilation": 2}])
def test_convolutions_with_groups(numbers, grid):
    """Grouped and depthwise ones, of both kinds of integers."""
    run(Convolution(8, 16, 3, grid, **numbers), rnd(2, 8, 9, 7))
    assert fusions() == ["int8 conv"]


def test_a_result_that_is_read_as_floats_stays_float():
    """A rounding isn't taken in where the product's result is read without it."""

    class Both(Quantised):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Linear(37, 19, X)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.layer(x)
            return y, self.rounded(y, H)

    model, x = Both(), rnd(5, 37)
    with torch.no_grad():
        floats, integers = compiled(model, "mkldnn", "eager", on_failure="raise")(x)
        exact = model.wide()(x.double())
        rival = model(x)
    assert_closer(floats, reference=exact[0], rival=rival[0])
    assert torch.equal(integers, rival[1])
    assert notes() == ["results of int8 products: 0 of 1 in int8"]


def test_concatenated_results_are_rounded_before():
    """Layers whose results are put side by side and then rounded give integers."""

    class Side(Quantised):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Linear(37, 19, X), Linear(37, 8, X, seed=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rounded(torch.cat([self.left(x), self.right(x)], 1), H)

    run(Side(), rnd(5, 37))
    assert notes() == ["results of int8 products: 2 of 2 in int8"]


@pytest.mark.parametrize("backends", [("mkldnn", "eager"), ("eager",)], ids="+".join)
@pytest.mark.whole
def test_no_float_weight_is_kept(backends):
    """Beside the integers there is nothing of the weight's shape in float32."""
    model = Linear(331, 97, X)  # large enough to be hoisted
    with torch.no_grad():
        compiled(model, *backends, on_failure="raise")(rnd(5, 331))
    gc.collect()
    shapes = {(331, 97), (97, 331)}
    kept = [
        one
        for one in gc.get_objects()
        if type(one) is torch.Tensor
        and one.dtype == torch.float32
        and tuple(one.shape) in shapes
        and one.device.type == "cpu"
    ]
    assert kept == []
