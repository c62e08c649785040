"""The backend ``inductor-freezing``: code for any weights, never stale, never in the way."""

from __future__ import annotations

import copy
import gc
import sys
import weakref

import pytest
import torch
from torch import nn
from torch._inductor.codecache import PyCodeCache

from fuseboard.report.data import ledger
from fuseboard.run import weights as weights_module
from tests.support.backends import all_trips, compiled, graph_count, last_graph
from tests.support.freezing import NAME, Convolutions, Layers
from tests.support.values import assert_closer, rnd
from tests.support.weights import CHANGES, check, preparing_is_worth_it


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """What was prepared is prepared again at once; when that isn't worth it is tested elsewhere."""
    ledger.clear()
    preparing_is_worth_it(monkeypatch)


def frozen_region():
    """The only region, on this backend, with what it froze."""
    (region,) = last_graph("inference").regions
    assert (region.backend, region.hoisted) == (NAME, 1)
    assert [fusion.name for fusion in region.fusions] == ["weights as constants"]
    assert all_trips() == []
    return region


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Layers, Convolutions])
@pytest.mark.thorough
def test_frozen_code_is_as_accurate_as_eager(kind):
    """With batch norms folded and weights packed, no further from float64 than eager is."""
    model = kind()
    x = model.inputs()
    with torch.no_grad():
        result = compiled(model, NAME)(x)
        reference = copy.deepcopy(model).double()(x.double())
        assert_closer(result, reference=reference, rival=model(x))
        assert result.stride() == model(x).stride()
    assert frozen_region().notes == []


@pytest.mark.thorough
def test_weights_of_other_dtypes_and_sizes():
    """Integers, a scalar, a single element, one that isn't contiguous, one that is read twice."""

    class Odd(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("index", torch.tensor([3, 0, 2]))
            self.register_buffer("scale", torch.tensor(1.5))
            self.register_buffer("one", torch.tensor([0.25]))
            self.mixing = nn.Parameter(rnd(21, 21).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mixed = (x @ self.mixing + x @ self.mixing.sin()) * self.scale
            return super().forward(mixed)[self.index] + self.one

    model = Odd()
    fn = compiled(model, NAME)
    check(model, fn)
    with torch.no_grad():
        model.index.copy_(torch.tensor([1, 1, 3]))
        model.scale.fill_(-2.0)
        model.one.fill_(4.0)
    check(model, fn, after="new values")
    frozen_region()


@pytest.mark.parametrize(
    "activation",
    [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(), nn.Hardswish(), nn.Hardsigmoid(), nn.LeakyReLU(0.0)],
    ids=lambda activation: type(activation).__name__,
)
@pytest.mark.thorough
def test_nan_is_kept(activation):
    """oneDNN's relu and clip answer a number for it, in a convolution or after a sum."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), activation).eval()
    x = rnd(1, 3, 7, 7)
    x[0, 1, 3, 3] = float("nan")
    with torch.no_grad():
        result, expected = compiled(model, NAME)(x), model(x)
    assert expected.isnan().any()
    torch.testing.assert_close(result, expected, equal_nan=True, rtol=1e-5, atol=2e-6)
    assert all_trips() == []


@pytest.mark.thorough
def test_constants_of_the_graphs_own_stay():
    """A tensor that the user's code holds is no weight, and is in what weights are folded with."""
    mask = rnd(33, 21)

    class Masked(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            known = torch.tensor([1.0, -2.0, 3.0, 4.0]).unsqueeze(1)
            return nn.functional.linear(x, self.weight * mask.cos(), self.bias) * known

    for _ in range(2):  # also where Inductor has compiled the same before
        torch.compiler.reset()
        model = Masked()
        check(model, compiled(model, NAME, cache=False))
        assert all_trips() == []


# --- weights that change --------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_changed_weight_is_seen_in_the_very_next_call():
    """Whatever changed it; nothing is compiled again."""
    model = Layers()
    fn = compiled(model, NAME)
    check(model, fn)
    for change in CHANGES:
        change(model)
        check(model, fn, after=change.__name__)
    assert graph_count("inference") == 1
    frozen_region()


@pytest.mark.thorough
def test_batch_norm_statistics_that_change():
    """They are folded into the convolution before."""
    model = Convolutions()
    fn = compiled(model, NAME)
    check(model, fn)
    with torch.no_grad():
        model.layers[1].running_var.mul_(3)
        model.layers[4].running_mean.sub_(0.5)
    check(model, fn, after="new statistics")
    model.train()(model.inputs())
    model.eval()
    check(model, fn, after="training")


@pytest.mark.thorough
def test_instances_share_the_code():
    """Each has its own constants in it."""
    models = [Layers(seed) for seed in range(3)]
    functions = [compiled(model, NAME) for model in models]
    for _ in range(2):
        for model, fn in zip(models, functions, strict=True):
            check(model, fn)
    assert graph_count("inference") == 1


@pytest.mark.thorough
def test_repeated_blocks_are_compiled_once():
    """Regions of one signature, each with its weights."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(21, 21), nn.Tanh()) for _ in range(3)))
    x = rnd(4, 21)
    fn = compiled(model, NAME, repeats="always")
    with torch.no_grad():
        torch.testing.assert_close(fn(x), model(x), rtol=1e-5, atol=2e-6)
        model[1][0].weight.mul_(-1)
        torch.testing.assert_close(fn(x), model(x), rtol=1e-5, atol=2e-6)
    regions = last_graph().regions
    assert {region.backend for region in regions} == {NAME}
    assert all_trips() == []


def test_constants_are_freed_with_the_module():
    """Torch keeps each module that it loads; it mustn't keep the weights that way."""
    models = [Layers(seed) for seed in range(2)]
    fn = compiled(lambda model, x: Layers.forward(model, x), NAME)
    with torch.no_grad():
        for model in models:
            fn(model, model.inputs())
    handles = [
        weakref.ref(value)
        for sets in list(weights_module._all_sets)
        for entry in sets._entries.values()
        for value in entry.values
        if hasattr(value, "frozen")
    ]
    frozen = [weakref.ref(handle().frozen) for handle in handles]
    alive = [model.weight for model in models]
    dead = weakref.ref(models[1].weight)
    assert len(frozen) >= 2
    before = sum(reference() is not None for reference in frozen)
    del models[1:], model, alive
    gc.collect()
    assert dead() is None
    assert sum(reference() is not None for reference in frozen) == before - 1
    held = [module for module in (*PyCodeCache.modules, *sys.modules.values()) if module]
    assert not any("_frozen_param0" in vars(module) for module in held if hasattr(module, "key"))
