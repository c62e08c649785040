"""What the backend ``inductor-freezing`` declines, what it does without, and when it is chosen."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import fuseboard
from fuseboard.contracts import Measurement
from fuseboard_inductor._recipes import Recipe
from tests.support.backends import all_trips, compiled, forget_other_graphs, last_graph, observing
from tests.support.freezing import NAME, Convolutions, Layers
from tests.support.values import rnd
from tests.support.weights import check, preparing_is_worth_it


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """What was prepared is prepared again at once; when that isn't worth it is tested elsewhere."""
    forget_other_graphs(monkeypatch)
    preparing_is_worth_it(monkeypatch)


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


@pytest.mark.thorough
def test_graphs_within_a_graph_are_compiled_one_by_one():
    """The op itself is declined; each of its graphs is a region's worth, with weights as inputs."""

    class Branches(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            above = super().forward(x)
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (above,))

    model = Branches()
    fn = compiled(model, NAME, "eager", min_region_us=0)
    check(model, fn)
    with torch.no_grad():
        model.weight.mul_(-1)
    check(model, fn, after="a change")
    cond = [region for region in last_graph().regions if any("cond" in op for op in region.ops)]
    assert [region.backend for region in cond] == [NAME]
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
@pytest.mark.thorough
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


@pytest.mark.thorough
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
