"""Linear layers with weights of 4 bits: what they mean, and where they are within a budget."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard.fuse import narrow
from fuseboard.ops.four_bits import GROUP, pack_in_4_bits
from fuseboard.pipeline import narrowing as narrowing_stage
from fuseboard.report.data import ledger
from fuseboard.torch_api import formats
from tests.support import narrowing
from tests.support.narrowing import report, rows

pytestmark = pytest.mark.skipif(
    formats.int4_product() is None, reason="torch has no vector kernel for int4 on this CPU"
)

compiled = partial(narrowing.compiled, tolerance=2e-2)
EPS = torch.finfo(torch.bfloat16).eps


@pytest.fixture(autouse=True)
def _measured(policy_measured, monkeypatch):
    """Choices are measured, within calls, and no half type is offered, whatever the CPU has."""
    monkeypatch.setattr(formats, "has_products_of", lambda dtype, device_type: False)


def on_grid(rows, columns, symmetric=False):
    """A weight of 16 steps in each group, as GGUF's Q4_0 (symmetric) and Q4_1 hold it."""
    numbers = torch.randint(0, 16, (rows, columns // GROUP, GROUP)).float()
    numbers[..., 0] = 0
    shape = (rows, columns // GROUP, 1)
    if symmetric:
        scale = (torch.rand(shape) + 0.5) * torch.randn(shape).sign() / 50
        return ((numbers - 8) * scale).view(rows, columns)
    numbers[..., 1] = 15
    scale, low = (torch.rand(shape) + 0.5) / 50, -torch.rand(shape) / 5
    return (numbers * scale + low).view(rows, columns)


def model(*weights):
    layers = [nn.Linear(*reversed(weight.shape)) for weight in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data = weight
    return nn.Sequential(*layers).eval()


# --- the op ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.whole
def test_a_weight_on_a_grid_is_found_again(symmetric):
    """But for the rounding of its scales; more rows than are rounded at a time are the same."""
    weight = on_grid(4096 + 64, 3 * GROUP, symmetric)
    packed, scales = pack_in_4_bits(weight)
    x = torch.eye(3 * GROUP)[:4]
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    got = product(x.bfloat16(), packed, GROUP, scales).double()
    sizes = weight.abs().view(len(weight), -1, GROUP).amax(-1)  # what is added may be as large
    off = (got - weight.t()[:4].double()).abs() / sizes[:, 0].double()
    assert float(off.max()) < 2 * EPS


def test_what_is_not_finite_stays_so():
    """And takes no more than its group with it; a group of zeros is zeros."""
    weight = torch.zeros(64, 2 * GROUP)
    weight[3, 5], weight[4, GROUP] = torch.nan, torch.inf
    packed, scales = pack_in_4_bits(weight)
    x = torch.ones(1, 2 * GROUP).bfloat16()
    got = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)[0]
    assert not got[3:5].isfinite().any()
    assert bool((got[:3] == 0).all())
    assert bool((got[5:] == 0).all())


# --- in a graph -----------------------------------------------------------------------------------


def test_a_weight_on_a_grid_is_narrowed():
    """Its results are those of its floats, up to the roundings of bfloat16; a bias is added."""
    module, x = model(on_grid(128, 64), on_grid(64, 128, symmetric=True)), torch.randn(2, 64)
    with torch.no_grad():
        got = compiled(module, tolerance=2e-2)(x)
        want = module.double()(x.double())
    assert got.dtype == torch.float32
    assert float((got - want).norm() / want.norm()) < EPS
    row = rows()["eager in int4"]
    assert row.state == "chosen"
    assert 1e-4 < row.error < EPS
    assert "in int4: 2 rewrites by narrow" in " ".join(report().notes)


def test_mkldnn_takes_all_of_it():
    """What packs a weight, too: else a graph would be cut around each layer."""
    module, x = model(on_grid(64, 64), on_grid(64, 64)), torch.randn(1, 64)
    module.append(nn.Linear(64, 10))  # what oneDNN itself runs
    with torch.no_grad():
        compiled(module, "mkldnn", tolerance=0.5)(x)
    assert "mkldnn in int4" in rows()


def test_a_weight_changed_in_place_is_rounded_again():
    module, x = model(on_grid(64, 64)), torch.randn(1, 64)
    with torch.no_grad():
        run = compiled(module)
        run(x)
        assert rows()["eager in int4"].state == "chosen"
        module[0].weight.mul_(2)
        got, want = run(x), module.double()(x.double())
    assert float((got - want).norm() / want.norm()) < EPS


def mixed():
    """Two layers on grids, and one between them with random weights, which 4 bits leave 8 % off."""
    torch.manual_seed(0)
    random, x = torch.randn(64, 64) / 8, torch.randn(1, 64)
    return model(on_grid(64, 64), random, on_grid(64, 64)), x


def planted():
    """A layer with an outlier in each group, where its input is small; and one without."""
    torch.manual_seed(0)
    weight, x = on_grid(64, 64), torch.randn(1, 64)
    weight[:, ::GROUP] *= 1000
    x[:, ::GROUP] /= 1000
    return model(weight, on_grid(64, 64)), x


@pytest.mark.parametrize(("made", "exact"), [(mixed, 1), (planted, 0)])
@pytest.mark.whole
def test_other_weights_are_not_rounded_to_4_bits(made, exact, monkeypatch):
    """They stay exact where no other format is there."""
    monkeypatch.setattr(narrow, "narrowing_to_int8", lambda graph: None)
    module, x = made()
    with torch.no_grad():
        got = compiled(module)(x)
        want = module.double()(x.double())
    assert float((got - want).norm() / want.norm()) < 2e-2
    (part,) = report().parts
    assert [place.module for place in part.places if place.exact] == [str(exact)]
    assert part.whole_error > 2e-2
    assert rows()["eager partly in int4"].state == "chosen"
    assert f"exact: {exact} (" in str(fuseboard.last_report())


def test_other_weights_are_in_another_format(monkeypatch):
    """In the narrowest with which all is within the budget: not in int8, if bfloat16 must do."""
    monkeypatch.setattr(formats, "has_products_of", lambda dtype, _: dtype == torch.bfloat16)
    module, x = mixed()
    for tolerance, rest in ((5e-2, "int8"), (1.2e-2, "bfloat16")):
        torch._dynamo.reset()
        ledger.clear()
        name = f"eager partly in int4, else in {rest}"
        with torch.no_grad():
            got = compiled(module, tolerance=tolerance)(x)
            want = copy.deepcopy(module).double()(x.double())
        error = float((got - want).norm() / want.norm())
        assert error < tolerance
        assert rows()[name].state == "chosen"
        assert rows()[name].error == pytest.approx(error, rel=1e-3)
        part = report().parts[-1]
        assert [place.exact for place in part.places] == [False, True, False]
        assert f"in {rest}: " in str(fuseboard.last_report())


def test_a_later_process_takes_both_formats(monkeypatch):
    """From the cost database: nothing is run to find them."""
    module, x = mixed()
    results = []
    for decided in ("measured in a call", "taken from the cost database"):
        torch._dynamo.reset()
        ledger.clear()
        with torch.no_grad():
            results.append(compiled(module, tolerance=5e-2)(x))
        assert rows()["eager partly in int4, else in int8"].state == "chosen"
        assert report().decided == decided
        monkeypatch.setattr(narrowing_stage, "Judge", None)
    assert torch.equal(*results)
    assert "2 of 3 places and the rest in int8, as an earlier" in str(fuseboard.last_report())


@pytest.mark.parametrize("shape", [(5, 64, 64), (1, 48, 64), (1, 64, 65)])
def test_what_the_kernel_does_not_gain_by_is_not_offered(shape):
    """More rows than 4, and sizes that it doesn't divide."""
    count, inner, outer = shape
    with torch.no_grad():
        compiled(nn.Linear(inner, outer))(torch.randn(count, inner))
    assert not any("int4" in name for name in rows())


def test_without_a_tolerance_nothing_changes():
    module, x = model(on_grid(64, 64)), torch.randn(1, 64)
    with torch.no_grad():
        assert torch.equal(compiled(module, tolerance=0)(x), module(x))
    assert list(rows()) == ["eager"] or not any("int4" in name for name in rows())


def test_a_model_with_other_weights_is_decided_on_by_itself():
    """Its graph is the same, and what is exact enough for the first isn't for the second."""
    x = torch.randn(1, 64)
    for weight, state in ((on_grid(64, 64), "chosen"), (torch.randn(64, 64) / 8, "inexact")):
        torch._dynamo.reset()
        ledger.clear()
        module = model(weight)
        with torch.no_grad():
            got, want = compiled(module)(x), module.double()(x.double())
        assert float((got - want).norm() / want.norm()) < 2e-2
        assert rows()["eager in int4"].state == state
        assert report().decided == "measured in a call"
        assert not report().trips
