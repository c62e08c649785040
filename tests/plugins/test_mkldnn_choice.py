"""What mkldnn claims, and which kernel it takes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard_mkldnn import _ops, _pack
from fuseboard_mkldnn._options import Options
from fuseboard_mkldnn._pack import Budget, LinearShape, choose
from tests.support.backends import compiled, last_graph
from tests.support.values import assert_closer, assert_same, rnd

SHAPE = LinearShape(m=5, k=19, n=7, dtype=torch.float32, bias=True, transposed=False, steps=())


@pytest.fixture(autouse=True)
def _nothing_chosen_before(monkeypatch):
    monkeypatch.setattr(_pack, "_chosen", {})


def measured(monkeypatch, **latencies_us: float) -> list[list[str]]:
    """Let measurements find these latencies; returns what was measured, call by call."""
    asked: list[list[str]] = []
    names: list[str] = []
    real = _pack.candidates

    def candidates(*args):
        calls = real(*args)
        names[:] = calls
        return calls

    def measure(calls, budget_s):
        asked.append(list(names))
        return [
            fuseboard.Measurement(latencies_us[name], 0.0, 0.0, 1)
            for name, _ in zip(names, calls, strict=True)
        ]

    monkeypatch.setattr(_pack, "candidates", candidates)
    monkeypatch.setattr(_pack, "FIRST_LOOK", float("inf"))
    monkeypatch.setattr(fuseboard, "measure", measure)
    return asked


@pytest.mark.parametrize("fastest", ["plain", "onednn", "mkl"])
def test_packing_can_lose(monkeypatch, fastest):
    """The fastest kernel is taken, whichever it is, and the choice is made once."""
    latencies = dict.fromkeys(("plain", "onednn", "mkl"), 20.0) | {fastest: 10.0}
    asked = measured(monkeypatch, **latencies)
    for _ in range(2):
        assert choose(SHAPE, tuple(latencies), Options(max_error=100.0), Budget(1.0)) == fastest
    assert asked == [["plain", "onednn", "mkl"]]


def test_a_tie_goes_to_the_simpler_kernel(monkeypatch):
    """Two percent are noise, not a reason to keep a second copy of a weight."""
    measured(monkeypatch, plain=100.0, onednn=98.0)
    assert choose(SHAPE, ("plain", "onednn"), Options(max_error=100.0), Budget(1.0)) == "plain"


def test_a_kernel_that_is_less_exact_is_not_taken(monkeypatch):
    """The fastest kernel loses if it is further from float64 than allowed."""

    def product(name, steps, x, weight, bias, other):
        exact = nn.functional.linear(x, weight, bias)
        return lambda: exact * 1.001 if name == "onednn" else exact

    monkeypatch.setattr(_pack, "_product", product)
    measured(monkeypatch, plain=100.0, onednn=1.0)
    assert choose(SHAPE, ("plain", "onednn"), Options(max_error=1.5), Budget(1.0)) == "plain"


def test_no_time_left_means_plain():
    """Without a measurement nothing is packed."""
    assert choose(SHAPE, ("plain", "onednn", "mkl"), Options(), Budget(0.0)) == "plain"


def test_measuring_leaves_the_random_numbers_alone():
    """Candidates run on random tensors of a generator of their own."""
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    choose(SHAPE, ("plain", "onednn"), Options(), Budget(1.0))
    assert torch.equal(torch.rand(4), expected)


def test_the_measured_choice_gives_right_answers():
    """Whatever was chosen for each shape on this machine."""
    model = nn.Sequential(
        *(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 33), nn.ReLU()),
        *(nn.Linear(33, 64, bias=False), nn.SiLU(), nn.Linear(64, 5)),
    )
    fast = compiled(model, "mkldnn", "eager", on_failure="raise")
    for rows in (1, 64):
        x = rnd(rows, 64)
        with torch.no_grad():
            reference = copy.deepcopy(model).double()(x.double())
            assert_closer(fast(x), reference=reference, rival=model(x))


def test_a_graph_without_products_is_declined():
    """Every node gets the reason."""

    def f(x):
        return torch.relu(x) + torch.sort(x)[0]

    with torch.no_grad():
        compiled(f, "mkldnn", "eager", on_failure="raise")(rnd(4, 4))
    reasons = {node.declined.get("mkldnn") for node in last_graph().nodes}
    assert reasons == {"nothing here for oneDNN"}


def test_other_ops_are_carried_along():
    """Ops that oneDNN hasn't got don't cut a region; they give eager's bits."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            values, order = torch.sort(self.linear(x), dim=-1)
            return values.cumsum(-1), order, torch.fft.rfft(values).abs()

    model, x = Model(), rnd(6, 32)
    with torch.no_grad():
        options = {"plugins": {"mkldnn": {"packing": "none"}}}
        assert_same(compiled(model, "mkldnn", "eager", on_failure="raise", **options)(x), model(x))
    assert [region.backend for region in last_graph().regions] == ["mkldnn"]


def test_two_inputs_are_no_weight():
    """A product of two inputs is computed, and nothing of them is packed."""
    x, y = rnd(6, 32), rnd(32, 8)
    with torch.no_grad():
        options = {"plugins": {"mkldnn": {"packing": "onednn"}}}
        assert_same(
            compiled(torch.mm, "mkldnn", "eager", on_failure="raise", **options)(x, y),
            torch.mm(x, y),
        )
    assert all(not region.fusions for region in last_graph().regions)


def test_a_torch_without_the_operators_makes_the_backend_unavailable(monkeypatch):
    """The reason names the operator; nothing fails later."""
    import fuseboard_mkldnn

    monkeypatch.setitem(_ops.EXPECTED, "mkldnn::_linear_pointwise", ("X", "W"))
    _ops.why_unavailable.cache_clear()
    try:
        info = fuseboard_mkldnn.fuseboard_backend()
    finally:
        monkeypatch.undo()
        _ops.why_unavailable.cache_clear()
    assert not info.available
    assert "mkldnn::_linear_pointwise" in info.reason
