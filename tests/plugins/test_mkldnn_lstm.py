"""LSTM layers with packed weights, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard_mkldnn import _ops, _pack
from tests.plugins.test_mkldnn_conv import fusions
from tests.support.backends import all_trips, compiled, last_graph
from tests.support.values import assert_closer, rnd


@pytest.fixture(autouse=True)
def captured():
    """Dynamo leaves ``nn.LSTM`` to eager unless told otherwise."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


def run(model: nn.Module, *inputs: torch.Tensor, packing: str = "onednn") -> None:
    model.eval()
    with torch.no_grad():
        options = {"plugins": {"mkldnn": {"packing": packing}}}
        result = compiled(model, "mkldnn", "eager", **options)(*inputs)
        rival = model(*inputs)
        reference = copy.deepcopy(model).double()(*[x.double() for x in inputs])
    assert_closer(result, reference=reference, rival=rival)
    assert all_trips() == []


LAYERS = {
    "one": ({}, 1),
    "batch first": ({"batch_first": True}, 1),
    "deep": ({"num_layers": 3}, 3),
    "both ways": ({"bidirectional": True, "num_layers": 2}, 4),
    "without bias": ({"bias": False}, 1),
}


@pytest.mark.parametrize("sizes", [(7, 3), (1, 1), (13, 5)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_an_lstm_is_as_accurate_as_eagers(name, sizes):
    """Layers, directions, layouts, with and without biases; results and last states."""
    further, count = LAYERS[name]
    run(nn.LSTM(5, 6, **further), rnd(*sizes, 5))
    assert fusions() == ["lstm"] * count


def test_given_states_are_used():
    """Not zeros."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(5, 6, num_layers=2)

        def forward(self, x, h, c):
            return self.lstm(x, (h, c))

    run(Model(), rnd(7, 3, 5), rnd(2, 3, 6, seed=1), rnd(2, 3, 6, seed=2))
    assert fusions() == ["lstm"] * 2


@pytest.mark.thorough
def test_symbolic_sizes():
    """Weights packed once serve any length and batch."""
    model = nn.LSTM(5, 6).eval()
    options = {"plugins": {"mkldnn": {"packing": "onednn"}}}
    call = compiled(model, "mkldnn", "eager", dynamic=True, **options)
    with torch.no_grad():
        for steps, batch in ((7, 3), (9, 4), (12, 2)):
            x = rnd(steps, batch, 5)
            reference = copy.deepcopy(model).double()(x.double())
            assert_closer(call(x), reference=reference, rival=model(x))
    assert all_trips() == []


def test_an_updated_weight_is_packed_again():
    """Both matrices, and the biases, which aren't packed."""
    model = nn.LSTM(5, 6).eval()
    options = {"plugins": {"mkldnn": {"packing": "onednn"}}}
    call = compiled(model, "mkldnn", "eager", **options)
    x = rnd(7, 3, 5)
    with torch.no_grad():
        call(x)
        for parameter in model.parameters():
            parameter.mul_(-1.5)
            reference = copy.deepcopy(model).double()(x.double())
            assert_closer(call(x), reference=reference, rival=model(x))


def test_projections_run_as_in_eager():
    """oneDNN has none; torch unrolls such an LSTM into its matrix products."""
    run(nn.LSTM(5, 6, proj_size=3), rnd(4, 3, 5))
    assert "lstm" not in fusions()


@pytest.mark.parametrize(("faster", "names"), [("packed", ["lstm"]), ("plain", [])])
def test_the_faster_one_is_taken(faster, names, monkeypatch):
    """The candidates compute the same, and the choice is by measurement."""

    def choose(calls, budget_s):
        with fuseboard.real_tensors():
            torch.testing.assert_close(calls["plain"]()[:3], calls["packed"]()[:3])
        return faster

    monkeypatch.setattr(_pack, "_fastest", choose)
    monkeypatch.setattr(_pack, "_chosen", {})
    run(nn.LSTM(5, 7), rnd(4, 3, 5), packing="measured")
    assert fusions() == names
    assert "mkldnn" in {region.backend for region in last_graph().regions}


def test_without_the_operator_eagers_runs(monkeypatch):
    """A torch that hasn't got it, or has another one."""
    monkeypatch.setattr(_ops, "lstm_layer", lambda: None)
    run(nn.LSTM(5, 6), rnd(4, 3, 5))
    assert fusions() == []


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a CPU with AVX-512 or AMX"
)
def test_an_lstm_in_bfloat16():
    """As near to float64 as eager's."""
    run(nn.LSTM(5, 6).bfloat16(), rnd(7, 3, 5, dtype=torch.bfloat16))
