"""Models that torchao's PT2E quantises, through each backend that runs integers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.backends import all_trips, compiled, last_graph
from tests.support.values import assert_closer, rnd

pytest.importorskip("torchao.quantization.pt2e", reason="needs torchao")


class Perceptron(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 80), nn.Linear(80, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Residual(nn.Module):
    """A residual block of convolutions, a pool and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Linear(16 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.first(x)), 2)
        x = torch.relu(self.second(x) + x)
        return self.last(torch.flatten(nn.functional.max_pool2d(x, 2), 1))


def quantised(model: nn.Module, x: torch.Tensor, dynamic: bool) -> Any:
    """Prepared, calibrated and converted as for x86 CPUs without VNNI."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    torch.manual_seed(0)
    config = x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic, reduce_range=True)
    quantizer = x86.X86InductorQuantizer().set_global(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_pt2e(torch.export.export(model.eval(), (x,)).module(), quantizer)
        with torch.no_grad():
            prepared(x)
        return convert_pt2e(prepared)


CASES = {
    "static": (Perceptron, (5, 48), False),
    "dynamic": (Perceptron, (5, 48), True),
    "convolutions": (Residual, (2, 3, 16, 16), False),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["mkldnn", "onnxruntime"])
@pytest.mark.whole
def test_a_quantised_model_computes_what_eager_does(backend, case):
    """As near to eager as another order of sums; wholly on the backend where it can be."""
    if backend == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="needs the extra onnxruntime")
    kind, shape, dynamic = CASES[case]
    torch.manual_seed(0)
    x = rnd(*shape)
    model = quantised(kind(), x, dynamic)
    with torch.no_grad():
        result = compiled(model, backend, "eager")(x)
        rival = model(x)
    assert_closer(result, reference=rival.double(), rival=rival)
    assert all_trips() == []
    if not (backend == "onnxruntime" and dynamic):
        assert {region.backend for region in last_graph().regions} == {backend}
