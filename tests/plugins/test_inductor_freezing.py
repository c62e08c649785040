"""The backend ``inductor-freezing``: code for any weights, never stale, never in the way."""

from __future__ import annotations

import copy
import gc
import sys
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.codecache import PyCodeCache

import fuseboard
from fuseboard.contracts import Measurement
from fuseboard.lower import weights as weights_module
from fuseboard.report.data import ledger
from fuseboard_inductor._recipes import Recipe
from tests.support.backends import all_trips, compiled, graph_count, last_graph, observing
from tests.support.values import assert_closer, rnd
from tests.support.weights import CHANGES, check

NAME = "inductor-freezing"


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """What was prepared is prepared again at once; when that isn't worth it is tested elsewhere."""
    ledger.clear()
    monkeypatch.setattr(weights_module.WeightSets, "_waits_on", lambda *_: False)


class Layers(nn.Module):
    """Two layers; ``weight`` is the first one's."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(rnd(33, 21, seed=seed))
        self.bias = nn.Parameter(rnd(33, seed=seed + 1))
        self.last = nn.Parameter(rnd(5, 33, seed=seed + 2) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(x, self.weight, self.bias).tanh()
        return nn.functional.linear(hidden, self.last)

    def inputs(self) -> torch.Tensor:
        return rnd(4, 21, seed=9)


class Convolutions(nn.Module):
    """Two of them with batch norms, odd channels, and a pooled linear layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 13, 3, padding=1, bias=False),
            nn.BatchNorm2d(13),
            nn.ReLU(),
            nn.Conv2d(13, 7, 3, stride=2),
            nn.BatchNorm2d(7),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(7, 5),
        )
        for number, tensor in enumerate([*self.parameters(), *self.buffers()]):
            if tensor.is_floating_point():
                tensor.data.copy_(rnd(*tensor.shape, seed=seed + number).abs() / 2 + 0.1)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def inputs(self) -> torch.Tensor:
        return rnd(2, 3, 11, 9, seed=9)


def frozen_region():
    """The only region, on this backend, with what it froze."""
    (region,) = last_graph("inference").regions
    assert (region.backend, region.hoisted) == (NAME, 1)
    assert [fusion.name for fusion in region.fusions] == ["weights as constants"]
    assert all_trips() == []
    return region


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Layers, Convolutions])
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


def test_instances_share_the_code():
    """Each has its own constants in it."""
    models = [Layers(seed) for seed in range(3)]
    functions = [compiled(model, NAME) for model in models]
    for _ in range(2):
        for model, fn in zip(models, functions, strict=True):
            check(model, fn)
    assert graph_count("inference") == 1


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


# --- what isn't frozen ----------------------------------------------------------------------------


def declined(kind: str = "inference") -> set[str]:
    """Why the backend took none of the last graph's nodes."""
    nodes = last_graph(kind).nodes
    assert {node.backend for node in nodes} == {"eager"}
    return {node.declined[NAME] for node in nodes if NAME in node.declined}


def test_training_is_declined():
    model = Layers()
    x = model.inputs()
    compiled(model, NAME, "eager")(x).sum().backward()
    torch.testing.assert_close(model.weight.grad, grad_of(Layers(), x))
    for kind in ("forward", "backward"):
        assert declined(kind) == {f"{NAME} takes no training graphs"}
    assert all_trips() == []


def grad_of(model: Layers, x: torch.Tensor) -> torch.Tensor:
    model(x).sum().backward()
    return model.weight.grad


def test_symbolic_sizes_are_declined():
    model = Layers()
    check(model, compiled(model, NAME, "eager", dynamic=True))
    assert declined() == {f"symbolic sizes; {NAME} has no dynamic shapes"}


def test_each_combination_of_sizes_is_frozen_where_that_is_asked_for():
    """The setting ``dynamic``: the combinations share nothing but the weights."""
    model = Layers()
    options = {"backends": [NAME, "eager"], "dynamic": "specialise"}
    fn = torch.compile(model, backend="fuseboard", dynamic=True, options=options)
    for rows in (4, 7, 4):
        check(model, fn, rnd(rows, 21))
    with torch.no_grad():
        model.weight.mul_(-1)
    for rows in (4, 7):
        check(model, fn, rnd(rows, 21), after="a change")
    (region,) = last_graph().regions
    assert (region.backend, len(region.specialised)) == (NAME, 2)
    assert all_trips() == []


def test_graphs_within_a_graph_are_declined():
    class Branches(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            above = super().forward(x)
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (above,))

    model = Branches()
    check(model, compiled(model, NAME, "eager", min_region_us=0))
    nodes = last_graph().nodes
    reasons = {node.declined.get(NAME) for node in nodes if node.backend == "eager"}
    assert "weights aren't frozen in graphs within a graph" in reasons
    assert all_trips() == []


@pytest.mark.parametrize(
    ("forward", "options", "reason"),
    [
        (lambda self, x: x.sin() + 1, {}, "it has no weights"),
        (
            lambda self, x: (x.sin() @ self.weight.t(), self.weight.cos()),
            {},
            "a result depends on weights alone, and the caller could write to it",
        ),
        (Layers.forward, {"hoist": False}, "the setting hoist is off"),
        (Layers.forward, {"fuse_limit": 0}, "the rewrite is switched off"),
    ],
)
def test_what_can_not_be_frozen_is_compiled_without(forward, options, reason):
    """As the backend ``inductor`` does; a note says why."""
    model = type("Own", (Layers,), {"forward": forward})()
    fn = compiled(model, NAME, min_region_us=0, **options)
    x = model.inputs()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fn(x), model(x), rtol=1e-5, atol=2e-6)
        model.weight.mul_(2)
        torch.testing.assert_close(fn(x), model(x), rtol=1e-5, atol=2e-6)
    (region,) = last_graph().regions
    assert region.backend == NAME
    assert f"nothing is frozen: {reason}" in region.notes
    assert all_trips() == []


@pytest.mark.parametrize("name", ["freezing_discard_parameters", "max_autotune", "cpp_wrapper"])
def test_settings_that_would_break_a_promise_are_refused(name):
    options = {f"plugins.{NAME}.config": {name: True}}
    with pytest.raises(BackendCompilerFailed, match=f"SettingsError: .* {name}: "):
        compiled(Layers(), NAME, **options)(Layers().inputs())


# --- failures -------------------------------------------------------------------------------------


def test_a_version_of_torch_that_tells_too_little_is_contained(monkeypatch):
    """Where it isn't known how a constant is made, eager runs, and the report says why."""
    for hook in ("_register_erase_node_hook", "_unregister_erase_node_hook"):
        monkeypatch.setattr(torch.fx.GraphModule, hook, lambda self, function: None)
    model = Layers()
    check(model, compiled(model, NAME, "eager", cache=False))
    (trip,) = all_trips()
    assert (trip.stage, trip.instead) == ("lower", "eager")
    assert "it isn't known how Inductor made its constant" in trip.error


def test_a_failure_to_freeze_other_weights_is_contained(monkeypatch):
    """In a call: it has eager's results, and so have all that follow."""
    model = Layers()
    fn = compiled(model, NAME, "eager")
    check(model, fn)

    def fail(recipe, weights):
        raise RuntimeError("no memory to pack")

    monkeypatch.setattr(Recipe, "follow", fail)
    with torch.no_grad():
        model.weight.mul_(2)
    check(model, fn)
    (trip,) = all_trips()
    assert (trip.stage, trip.instead) == ("run", "eager")
    assert "no memory to pack" in trip.error


# --- the choice -----------------------------------------------------------------------------------


def test_it_waits_to_be_named():
    """By default nobody compiles for it."""
    with torch.no_grad():
        torch.compile(torch.sin, backend="fuseboard")(rnd(3))
    assert NAME in last_graph().left_out
    assert last_graph().left_out[NAME] == "it runs only where the setting backends names it"


def timed(**latencies_us: float):
    """A measuring hook by which candidates take so long, in their order."""
    return observing(
        "stopwatch",
        measure=lambda calls: [
            Measurement(us, us, us, 1) for us, _ in zip(latencies_us.values(), calls, strict=True)
        ],
    )


@pytest.mark.parametrize(("us", "winner"), [(50.0, NAME), (99.0, "eager")])
def test_it_is_chosen_where_it_wins(monkeypatch, tmp_path, us, winner):
    """Verified and timed beside the others; a later compile takes decision and code."""
    monkeypatch.setenv("FUSEBOARD_POLICY", "measured")
    options = {"settle": "first_call", "cache_dir": str(tmp_path)}
    model = Layers()
    with timed(eager=100.0, frozen=us):
        check(model, compiled(model, NAME, "eager", **options))
    states = {told.name: told.state for told in last_graph().candidates}
    assert states == {"eager": "slower", NAME: "slower"} | {winner: "chosen"}
    assert [region.backend for region in last_graph().regions] == [winner]

    torch.compiler.reset()
    model = Layers(seed=4)
    fn = compiled(model, NAME, "eager", **options)
    check(model, fn)
    graph = last_graph()
    assert graph.decided == "taken from the cost database"
    assert [region.backend for region in graph.regions] == [winner]
    assert [region.loaded for region in graph.regions] == [winner == NAME]
    with torch.no_grad():
        model.weight.mul_(2)
    check(model, fn, after="a change")
    assert all_trips() == []


@pytest.mark.slow
def test_it_is_compiled_beside_the_calls(monkeypatch, tmp_path):
    """In a child process, on stand-ins for the weights; the first call doesn't wait for it."""
    monkeypatch.setenv("FUSEBOARD_POLICY", "measured")
    model = Convolutions()
    fn = compiled(model, NAME, "eager", cache_dir=str(tmp_path))
    with timed(eager=100.0, frozen=50.0):
        check(model, fn)
        assert fuseboard.wait(progress=False)
    (region,) = last_graph().regions
    assert region.backend == NAME
    assert "compiled in a child process" in region.notes
    check(model, fn)
    with torch.no_grad():
        model.layers[0].weight.mul_(2)
    check(model, fn, after="a change")
    assert all_trips() == []
