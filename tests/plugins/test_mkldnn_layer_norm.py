"""Layer norms that are written out run as ATen's kernel between oneDNN's layers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuseboard_mkldnn import _lower
from tests.support.backends import all_trips, compiled, last_graph
from tests.support.values import assert_closer, rnd
from tests.test_composites import LAYER, layer_wide, rms_by_product

OPTIONS = {"on_failure": "raise", "verify": "always", "min_region_us": 0}
FORMS = [function for function in LAYER if function is not layer_wide]  # without casts


@pytest.fixture
def replaced(monkeypatch) -> list[str]:
    """The forms that the kernel stands for, lowering by lowering."""
    forms: list[str] = []
    real = _lower.layer_norms

    def noted(graph):
        found = real(graph)
        forms.extend(one.form for one in found)
        return found

    monkeypatch.setattr(_lower, "layer_norms", noted)
    torch._dynamo.reset()
    return forms


class Between(nn.Module):
    """A norm whose operand and whose result are those of linear layers."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.first, self.second = nn.Linear(24, 16), nn.Linear(16, 24)
        self.weight, self.bias = nn.Parameter(rnd(16, seed=1)), nn.Parameter(rnd(16, seed=2))

    def forward(self, x):
        return self.second(self.norm(self.first(x), self.weight, self.bias))


@pytest.mark.parametrize("norm", FORMS, ids=lambda norm: norm.__name__)
@pytest.mark.parametrize("dynamic", [False, True])
def test_values(norm, dynamic, replaced):
    """As near to float64 as eager's, for fixed and for symbolic sizes."""
    model = Between(norm).eval()
    exact = copy.deepcopy(model).double()
    run = compiled(model, "mkldnn", "eager", dynamic=dynamic, **OPTIONS)
    for rows in (5, 7):
        x = rnd(3, rows, 24)
        with torch.no_grad():
            assert_closer(run(x), reference=exact(x.double()), rival=model(x))
    assert len(replaced) >= 1
    assert all_trips() == []
    (region,) = last_graph("inference").regions
    assert region.backend == "mkldnn"
    assert "composite layer_norm ×1" in region.notes


def test_rows_of_any_length(replaced):
    """Where the length of rows is symbolic, ops stay as they are written."""

    def model(x, second):
        return FORMS[0](F.linear(second, second)[:, : x.shape[-1]] + x, x[0], x[1])

    second = nn.Parameter(rnd(40, 40))
    run = compiled(lambda x: model(x, second), "mkldnn", "eager", dynamic=True, **OPTIONS)
    for size in (12, 16):
        x = rnd(40, size, seed=1)
        with torch.no_grad():
            got = run(x)
            exact, rival = model(x.double(), second.double()), model(x, second)
        assert_closer(got, reference=exact, rival=rival)
    assert replaced == []
    assert all_trips() == []


def test_what_the_kernel_isnt(replaced):
    """Another norm, and one of a tensor that lies otherwise in memory."""

    def model(x, w, b, second):
        turned = FORMS[0](x.transpose(0, 1), w, b)
        return F.linear(rms_by_product(x, w), second), turned

    inputs = rnd(3, 5, 16), rnd(16, seed=1), rnd(16, seed=2), rnd(24, 16, seed=3)
    with torch.no_grad():
        got = compiled(model, "mkldnn", "eager", **OPTIONS)(*inputs)
    assert_closer(got, reference=model(*[one.double() for one in inputs]), rival=model(*inputs))
    assert got[1].stride() == model(*inputs)[1].stride()
    assert replaced == []
