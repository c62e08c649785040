"""Quantised products with frozen weights: in int8 where that is exact, apart elsewhere."""

from __future__ import annotations

import pytest
import torch

import fuseboard
from tests.support.backends import all_trips, compiled, last_graph
from tests.support.freezing import NAME
from tests.support.quantised import REDUCED, UNSIGNED, Convolution, Grid, Linear, Quantised
from tests.support.values import assert_closer, rnd

X: Grid = (0.03, 60, *REDUCED)
H: Grid = (0.04, 7, *UNSIGNED)


class Layers(Quantised):
    """A product, relu, and another one."""

    def __init__(self, kind: str, between: Grid = H, given: Grid = X) -> None:
        super().__init__()
        if kind == "linear":
            self.first, self.second = Linear(64, 32, given), Linear(32, 5, between, seed=1)
        else:
            self.first = Convolution(8, 16, 3, given, padding=1)
            self.second = Convolution(16, 16, 3, between, seed=1)
        for layer in (self.first, self.second):  # so that sums of pairs fit into 16 bits
            layer.weight.held.clamp_(-64, 63)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))

    def inputs(self) -> torch.Tensor:
        return rnd(16, 64) if self.kind == "linear" else rnd(2, 8, 12, 12)


def run(model: Layers) -> None:
    x = model.inputs()
    with torch.no_grad():
        result = compiled(model, NAME, "eager")(x)
        assert_closer(result, reference=model.wide()(x.double()), rival=model(x))
    assert all_trips() == []


@pytest.mark.parametrize(
    "kind", ["linear", pytest.param("convolution", marks=pytest.mark.thorough)]
)
def test_quantised_products_are_frozen(kind, monkeypatch):
    """The whole graph, with packed weights that a recipe makes."""
    # The weights are such that none is.
    monkeypatch.setattr(fuseboard, "cuts_off_int8_sums", lambda: False)
    run(Layers(kind))
    (region,) = last_graph().regions
    assert (region.backend, region.hoisted) == (NAME, 1)


@pytest.mark.thorough
def test_a_changed_weight_is_noticed(monkeypatch):
    """Code with frozen integers isn't used for others."""
    monkeypatch.setattr(fuseboard, "cuts_off_int8_sums", lambda: False)
    model = Layers("linear")
    fn, x = compiled(model, NAME, "eager"), model.inputs()
    with torch.no_grad():
        for _ in range(2):
            assert_closer(fn(x), reference=model.wide()(x.double()), rival=model(x))
            model.first.weight.held.neg_()
            model.second.weight.scales.mul_(2)


@pytest.mark.thorough
def test_a_result_of_a_part_of_its_range_is_rounded_apart(monkeypatch):
    """Inductor's kernels cut off at the ends of the dtype alone."""
    monkeypatch.setattr(fuseboard, "cuts_off_int8_sums", lambda: False)
    run(Layers("linear", between=(0.01, 7, *REDUCED)))
    assert len(last_graph().regions) > 1


@pytest.mark.thorough
def test_sums_that_are_cut_off_are_left_to_floats(monkeypatch):
    """Without VNNI, integers beyond 128 aren't multiplied as such."""
    monkeypatch.setattr(fuseboard, "cuts_off_int8_sums", lambda: True)
    run(Layers("linear", given=(0.03, 120, *UNSIGNED)))
    assert any(region.backend == "eager" for region in last_graph().regions)
