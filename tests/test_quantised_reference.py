"""What quantised graphs compute without roundings of float32, and who is judged right by that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fuseboard.profile.judge.reference import make_reference
from fuseboard.profile.judge.values import judge
from tests.support.quantised import UNSIGNED, Grid, Linear, Quantised
from tests.support.values import rnd

X: Grid = (0.03, 120, *UNSIGNED)
H: Grid = (0.04, 7, *UNSIGNED)


class Deep(Quantised):
    """Layers with relu between; what each rounds goes through all that follow.

    :param rounded: the result is rounded, too.
    """

    def __init__(self, seed: int, rounded: bool) -> None:
        super().__init__()
        layers = [Linear(64, 64, X, seed=10 * seed + i) for i in range(5)]
        for layer in layers:
            layer.weight.scales /= 6
        self.layers, self.result_rounded = torch.nn.ModuleList(layers), rounded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.rounded(x, H) if self.result_rounded else x


class ExactSums(TorchDispatchMode):
    """An engine whose products are summed as integers are: exactly, and rounded once."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function is torch.ops.aten.addmm.default:
            return (args[1].double() @ args[2].double()).float() + args[0]
        return function(*args, **(kwargs or {}))


def reference_of(model: Quantised, x: torch.Tensor) -> Any:
    graph = make_fx(lambda x: (model(x),))(x)
    return make_reference(graph, [x])


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.whole
def test_the_reference_is_float64s(rounded):
    """Roundings to integers stay, those of float32 don't, and nothing is noted."""
    model, x = Deep(0, rounded), rnd(16, 64)
    with torch.no_grad():
        reference = reference_of(model, x)
        exact = model.wide()(x.double())
    torch.testing.assert_close(reference.precise[0], exact, rtol=1e-12, atol=1e-12)
    assert reference.notes == ()


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.whole
def test_exact_sums_are_right(rounded):
    """An engine that adds integers isn't refused for what lies between two of them."""
    for seed in range(8):
        model, x = Deep(seed, rounded), rnd(32, 64, seed=seed + 100)
        with torch.no_grad():
            reference = reference_of(model, x)
            with ExactSums():
                result = model(x)
        assert judge(reference, [result]).ok


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.whole
def test_another_grid_is_wrong(rounded):
    """A zero point that is one off, and a range that isn't kept, are seen."""
    model, x = Deep(0, rounded), rnd(16, 64)
    with torch.no_grad():
        reference = reference_of(model, x)
        for grid in ((0.03, 121, *UNSIGNED), (0.03, 120, 0, 200, torch.uint8)):
            model.layers[3].grid = grid
            assert not judge(reference, [model(x)]).ok
