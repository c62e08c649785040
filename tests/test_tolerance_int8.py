"""Linear layers in int8: what the rewrite means, and what becomes of it within a budget."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from fuseboard.fuse import narrow_integers
from fuseboard.torch_api import formats
from tests.support import narrowing
from tests.support.narrowing import report, rows

ROOT = Path(__file__).parent.parent
INT8 = "eager in int8"

compiled = partial(narrowing.compiled, tolerance=5e-2)


@pytest.fixture(autouse=True)
def _measured(policy_measured, monkeypatch):
    """Choices are measured, within calls, and no other format is offered, whatever the CPU has."""
    monkeypatch.setattr(formats, "has_products_of", lambda dtype, device_type: False)


def rounded_input(x, steps):
    """Float64 values of what a tensor is rounded to."""
    low, high = (float(bound) for bound in torch.aminmax(x))
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / steps
    zero = round(-low / scale)
    held = (x.float() / scale).round().double() + zero
    return (held.clamp(0, steps) - zero) * scale


def rounded_weight(weight):
    """The same of a weight (out, in)."""
    scales = weight.abs().amax(1, keepdim=True).double() / 127
    return (weight.double() / scales).round() * scales


def linear(layer, x, steps):
    rows = rounded_input(x, steps).flatten(0, -2)
    return (rows @ rounded_weight(layer.weight).T).unflatten(0, x.shape[:-1]) + layer.bias.double()


# --- the rewrite ----------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("backend", ["eager", "mkldnn"])
def test_values_are_those_of_integers(whole, backend, monkeypatch):
    """A byte's steps, or half of them where the CPU can't add products of more."""
    monkeypatch.setattr(narrow_integers, "cuts_off_int8_sums", lambda: not whole)
    layer, x = nn.Linear(96, 64).eval(), torch.randn(4, 9, 96)
    with torch.no_grad():
        got = compiled(layer, *{backend} - {"eager"})(x)
        want = linear(layer, x, 255 if whole else 127)
    torch.testing.assert_close(got, want.float())
    assert rows()[f"{backend} in int8"].state == "chosen"
    assert 1e-3 < rows()[f"{backend} in int8"].error < 3e-2


@pytest.mark.parametrize("backend", ["eager", "mkldnn"])
@pytest.mark.whole
def test_a_weight_may_lie_the_other_way(backend):
    """As in GPT-2, (in, out): scales are those of outputs all the same."""
    layer, x = nn.Linear(96, 64), torch.randn(8, 96)
    with torch.no_grad():
        layer.weight[0] *= 1000
        module = nn.Module()
        module.weight, module.bias = nn.Parameter(layer.weight.t().contiguous()), layer.bias
        module.forward = lambda x: torch.addmm(module.bias, x, module.weight)
        got = compiled(module, *{backend} - {"eager"})(x)
        want = linear(layer, x, 127 if formats.cuts_off_int8_sums() else 255)
    sizes = want.abs().amax(0)  # sums that nearly cancel are as exact as what is added
    torch.testing.assert_close((got / sizes).float(), (want / sizes).float())
    assert rows()[f"{backend} in int8"].state == "chosen"


def test_an_input_of_several_layers_is_rounded_once():
    """And a weight of several, such as a tied one."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            x = nn.functional.layer_norm(x, (64,))
            return self.q(x), self.k(x), self.q(x.sin())

    with torch.no_grad():
        compiled(Heads().eval())(torch.randn(4, 8, 64))
    assert rows()[INT8].state == "chosen"
    ops = [node.op for node in report().nodes]
    assert sum("choose_qparams" in op for op in ops) == 2
    assert sum("quantize_per_channel" in op and "dequantize" not in op for op in ops) == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x @ x.T.sin(),  # no weight is read
        lambda x, w: torch.addmm(x[:, :8], x, w, beta=0.5),
        lambda x, w: (x.bfloat16() @ w.bfloat16()).float(),
        lambda x, w: x.double() @ w.double(),
        lambda x, w: x.sin(),
    ],
    ids=["two_results", "scaled", "half", "double", "none"],
)
def test_what_is_no_layer_of_floats_stays(function):
    with torch.no_grad():
        compiled(function)(torch.randn(16, 16), torch.randn(16, 8))
    assert not [name for name in rows() if "int8" in name]


def test_a_torch_without_the_ops_offers_none(monkeypatch):
    monkeypatch.setattr(narrow_integers, "quantised_ops", lambda: None)
    with torch.no_grad():
        compiled(nn.Linear(16, 16))(torch.randn(4, 16))
    assert not [name for name in rows() if "int8" in name]


# --- within a budget ------------------------------------------------------------------------------


def test_a_channel_of_outliers_is_not_rounded_away():
    """The others would have no step left: it is measured, and refused."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()).eval(), torch.randn(32, 64)
    x[:, 5] *= 1000
    with torch.no_grad():
        model[0].weight[:, 5] /= 1000
        got = compiled(model)(x)
    assert rows()[INT8].state == "inexact"
    assert rows()[INT8].error > 5e-2
    assert torch.equal(got, model(x))


def test_what_is_not_finite_is_seen():
    """A result that eager has and integers haven't is an endless error."""
    layer, x = nn.Linear(64, 64).eval(), torch.randn(8, 64)
    x[3, 3] = torch.inf
    with torch.no_grad():
        got = compiled(layer)(x)
        torch.testing.assert_close(got, layer(x), equal_nan=True)
    assert rows()[INT8].state == "inexact"


def test_onednn_runs_it_on_packed_integers():
    """Weights are rounded and packed when they change, and kept as no floats."""
    layer, x = nn.Linear(256, 256).eval(), torch.randn(32, 256)
    with torch.no_grad():
        run = compiled(layer, "mkldnn")
        run(x)
        (region,) = report().regions
        assert region.backend == "mkldnn"
        assert any("int8 linear" in one.name for one in region.fusions)
        layer.weight.mul_(2)
        got, want = run(x), layer(x)
        assert (got - want).norm() <= 5e-2 * want.norm()


SCRIPT = """
import torch, fuseboard
from fuseboard.workshop.trial import Trial
from tests.support.narrowing import compiled

Trial._winner = lambda trial: 1

def main():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(256, 256).eval(), torch.randn(32, 256)
    with torch.no_grad():
        run = compiled(layer, "mkldnn", tolerance=5e-2)
        for _ in range(8):
            run(x)
            fuseboard.wait(100)
    graph = fuseboard.last_report().graphs[0]
    print(graph.settled, [r.backend for r in graph.regions], "load" in graph.seconds, graph.notes)
    print([one.name for one in graph.candidates if one.state == "chosen"])

if __name__ == "__main__":
    main()
"""


@pytest.mark.thorough
def test_a_process_that_loads_it_has_the_ops(as_users_run_it, tmp_path):
    """They aren't there after ``import torch``; a rewrite brought them."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "can't be loaded" not in done.stderr
        assert done.stdout.startswith("True ['mkldnn'] True"), done.stdout
        assert "mkldnn in int8" in done.stdout


@pytest.mark.slow
def test_inductor_compiles_it_too():
    """Its lowering of a weight by output needs zero points."""
    layer, x = nn.Linear(96, 64).eval(), torch.randn(4, 96)
    with torch.no_grad():
        compiled(layer, "inductor", settle="first_call")(x)
    assert rows()["inductor in int8"].error < 3e-2
    assert rows()["inductor in int8"].state in ("chosen", "slower")
    assert not report().trips


def test_what_kernels_do_is_found_under_any_default_dtype():
    """A program that sets float64 has the same backends."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = formats.cuts_off_int8_sums.__wrapped__()
    finally:
        torch.set_default_dtype(before)
    assert found == formats.cuts_off_int8_sums()
