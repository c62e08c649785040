"""Plugins that fail: contained by the policy, told in the report, and eager's answer comes out."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard.errors import RegionError
from tests.support.backends import (
    all_trips,
    claim_all,
    claim_ops,
    compiled,
    last_graph,
    observing,
    plugged,
)
from tests.support.contained import LIMIT_S, Boom, boom, check, f, on_region, train
from tests.support.values import assert_same, rnd

# --- hooks that raise, hang or answer nonsense ---------------------------------------------------

HOOKS = {
    # hook: (stage in the trip, what runs instead)
    "decompositions": ("lower", "eager"),  # in training at the capture, too
    "fuse": ("fuse", "the graph without its rewrites"),
    "claim": ("claim", "the other backends"),
    "lower": ("lower", "eager"),
}


def hanging(*args, **kwargs):
    time.sleep(60)


def answering(answer):
    return lambda: answer


def raising():
    raise Boom("the engine exploded")


def raising_lowering_error():
    raise fuseboard.LoweringError("the engine has no such op")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (raising, "Boom: the engine exploded"),
        (raising_lowering_error, "the engine has no such op"),
        (hanging, "no answer within hook_limit_s = 0.5 "),
        (answering(3), "it returned 3 of type int"),
    ],
    ids=["raises", "raises_lowering_error", "hangs", "lies"],
)
def test_a_hook_that_fails(hook, lie, said):
    """Every hook of a backend, in inference and in training: contained, and told."""
    stage, instead = HOOKS[hook]
    fake = (lambda: lie()) if lie is not hanging else (lambda: time.sleep(60))
    with plugged("bad", **{hook: fake}):
        check(compiled(f, "bad", hook_limit_s=LIMIT_S), rnd(3, 5))
        trips = all_trips()
        train(compiled(f, "bad", hook_limit_s=LIMIT_S), f, rnd(3, 5))
    first = trips[0]
    assert (first.plugin, first.stage) == ("bad", stage)
    assert said in first.error
    assert first.instead == instead
    assert {trip.plugin for trip in all_trips()} == {"bad"}
    at_capture = [trip.instead for trip in all_trips() if trip.stage == "capture"]
    assert at_capture == ["the other backends' level"] * (hook == "decompositions")


def test_a_backend_that_claims_and_cannot_lower():
    """The trip names the hook that was forgotten."""
    with plugged("bad", lower=None):
        check(compiled(f, "bad"), rnd(3, 5))
    assert [trip.error for trip in all_trips()] == [
        "LoweringError: bad claims nodes and has no hook fuseboard_lower"
    ]


@pytest.mark.parametrize("lie", [raising, answering(None), answering((3, 4))])
@pytest.mark.parametrize("hook", ["plan", "partition_joint", "verify", "on_failure"])
def test_a_stage_that_fails(hook, lie):
    """Plugins without a backend that decide for all: the default decides in their place."""
    with observing("bad", **{hook: lambda: lie()}), plugged(lower=lambda: boom()):
        train(compiled(f, "fake"), f, rnd(3, 5))
    own = [trip for trip in all_trips() if trip.plugin == "bad"]
    if lie() is None if lie is not raising else False:
        assert not own
    elif hook != "on_failure":
        assert own
    assert any(trip.plugin == "fake" and trip.stage == "lower" for trip in all_trips())


def test_an_observer_that_fails():
    """It cannot break a compile; the notes name it."""
    with observing("bad", event=lambda: boom()):
        check(compiled(f), rnd(3))
    assert not all_trips()


@pytest.mark.parametrize(
    ("apply", "said"),
    [
        (lambda graph, node: boom(), "fusion 'bad rewrite' raised Boom: the engine exploded"),
        (lambda graph, node: time.sleep(60), "fusion 'bad rewrite' took over 0.5 s"),
        (lambda graph, node: _half_way(graph, node), "Boom"),
        (lambda graph, node: _forward_reference(graph, node), "malformed"),
        (lambda graph, node: _without_value(graph, node), "has no meta['val']"),
    ],
    ids=["raises", "hangs", "half_way", "malformed", "without_value"],
)
@pytest.mark.parametrize("level", ["graph", "region"])
def test_a_rewrite_that_fails(level, apply, said):
    """What it did to the graph before it failed is dropped."""

    def fuse(graph, region):
        if (region is None) != (level == "graph"):
            return None
        nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
        return [
            fuseboard.Fusion("bad rewrite", (node.name,), lambda node=node: apply(graph, node))
            for node in nodes
        ]

    with plugged("bad", fuse=fuse):
        check(compiled(f, "bad", hook_limit_s=LIMIT_S), rnd(3, 5))
        trips = all_trips()
        train(compiled(f, "bad", hook_limit_s=LIMIT_S), f, rnd(3, 5))
    assert [(trip.plugin, said in trip.error) for trip in trips] == [("bad", True)]


def _half_way(graph, node):
    node.replace_all_uses_with(node.args[0])
    raise Boom("the engine exploded")


def _forward_reference(graph, node):
    last = list(graph.graph.nodes)[-2]
    node.args = (last, *node.args[1:])


def _without_value(graph, node):
    with graph.graph.inserting_after(node):
        other = graph.graph.call_function(torch.ops.aten.neg.default, (node.args[0],))
    node.replace_all_uses_with(other)


def test_a_plugin_that_changes_the_graph_it_is_asked_about():
    """Claims are made on a copy, plans too; nobody else sees what was done to it."""

    def vandal(graph):
        answers = claim_all(graph)
        for node in list(graph.graph.nodes):
            if node.op == "call_function":
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
        return answers

    with plugged("bad", claim=vandal), plugged("good", claim=claim_all):
        check(compiled(f, "bad", "good"), rnd(3, 5))
    assert {trip.plugin for trip in all_trips()} <= {"bad"}
    assert len(last_graph().nodes) == 3


# --- the policy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["lower", "run", "fuse", "claim"])
def test_on_failure_raise(stage):
    """One exception that names plugin, stage, region and the user's line; nothing runs instead."""
    hooks = {"call": on_region(boom)} if stage == "run" else {stage: lambda: boom()}
    with plugged("bad", **hooks):
        fn = compiled(f, "bad", on_failure="raise")
        with torch.no_grad(), pytest.raises(Exception, match="plugin 'bad' failed") as caught:
            fn(rnd(3))
    error = getattr(caught.value, "inner_exception", caught.value)  # Dynamo wraps it
    assert isinstance(error, RegionError)
    text = str(error)
    assert f"in stage '{stage}'" in text
    assert "the engine exploded" in text
    assert "inference" in text
    if stage in {"lower", "run"}:
        assert "region0" in text
        assert f"{f.__code__.co_filename}:" in text
    assert not all_trips()


def test_on_failure_next():
    """The next backend that claimed the region gets it."""
    with plugged("bad", lower=lambda: boom()), plugged("good"):
        check(compiled(f, "bad", "good"), rnd(3))
    (trip,) = all_trips()
    assert (trip.plugin, trip.instead) == ("bad", "good")
    assert last_graph().regions[0].backend == "good"
    assert {node.backend for node in last_graph().nodes} == {"good"}


def test_on_failure_next_passes_over_a_backend_that_did_not_claim_it():
    """It declined some of the region's ops."""
    with plugged("bad", lower=lambda: boom()), plugged("other", claim=claim_ops("relu")):
        check(compiled(f, "bad", "other"), rnd(3))
    (trip,) = all_trips()
    assert trip.instead == "eager"


def test_on_failure_eager():
    """No other backend is tried."""
    with plugged("bad", lower=lambda: boom()), plugged("good", lower=lambda: boom()):
        check(compiled(f, "bad", "good", on_failure="eager"), rnd(3))
    (trip,) = all_trips()
    assert (trip.plugin, trip.instead) == ("bad", "eager")


def test_every_backend_fails():
    """Eager is always the last one."""
    with plugged("bad", lower=lambda: boom()), plugged("worse", lower=lambda: None):
        check(compiled(f, "bad", "worse"), rnd(3))
    assert [(t.plugin, t.instead) for t in all_trips()] == [("bad", "worse"), ("worse", "eager")]


def test_a_plugin_decides_what_follows_a_failure():
    """The hook is asked with the region, the plugin, the stage and the error."""
    asked = []

    def on_failure(region, plugin, stage, error):
        asked.append((region, plugin, stage, type(error.__cause__).__name__))
        return "eager"

    with (
        observing("judge", on_failure=on_failure),
        plugged("bad", lower=lambda: boom()),
        plugged("good"),
    ):
        check(compiled(f, "bad", "good", on_failure="raise"), rnd(3))
    ((region, *rest),) = asked
    assert region.endswith("region0")
    assert rest == ["bad", "lower", "Boom"]
    assert all_trips()[0].instead == "eager"


# --- the user's own exceptions -------------------------------------------------------------------


def out_of_range(table, index):
    return nn.functional.embedding(index, table).sum()


def divide(x, y):
    return torch.div(x, y, rounding_mode="floor")


@pytest.mark.parametrize(
    ("function", "good", "bad"),
    [
        (out_of_range, (rnd(5, 3), torch.tensor([1, 2])), (rnd(5, 3), torch.tensor([1, 9]))),
        (divide, (torch.tensor([4]), torch.tensor([2])), (torch.tensor([4]), torch.tensor([0]))),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["in_the_first_call", "later"])
@pytest.mark.parametrize("name", ["eager", "fake"])
def test_the_users_own_exception(name, first, function, good, bad):
    """It has eager's type and text, nothing trips, and the next call works."""
    with plugged():
        fn = compiled(function, name)
        if not first:
            check(fn, *good, reference=function)
        with pytest.raises(Exception) as expected:  # noqa: PT011 # whatever eager raises
            function(*bad)
        with pytest.raises(type(expected.value)) as caught, torch.no_grad():
            fn(*bad)
        assert str(caught.value) == str(expected.value)
        check(fn, *good, reference=function)
    assert not all_trips()
    assert {region.backend for region in last_graph().regions} == {name}


def test_an_exception_outside_the_graph():
    """Dynamo breaks the graph; the exception is the user's."""

    def h(x):
        y = x + 1
        if y.sum() > 0:
            raise KeyError("mine")
        return y

    fn = compiled(h)
    with pytest.raises(KeyError, match="mine"):
        fn(torch.ones(3))
    assert_same(fn(-torch.ones(3) * 2), h(-torch.ones(3) * 2))


def _writes_to_a_weight(weight, x):
    """Torch's error about views, where ``x`` is a detached view of ``weight``."""
    with torch.no_grad():
        weight.add_(1)
    return x + 1, weight * 2


def _replaces_the_data(x):
    y = x.sin()
    x.data = torch.ones(3)
    return x + y


def _writes_over_itself(x, y):
    return torch.vmap(lambda row, values: row.clone().unfold(0, 2, 1).copy_(values))(x, y)


REFUSED = {
    "memory that overlaps itself": (
        _writes_over_itself,
        lambda weight: (weight.detach(), weight.new_ones(4, 2, 2)),
    ),
    "weight and its detached view": (
        _writes_to_a_weight,
        lambda weight: (weight, weight.detach()[:3]),
    ),
    "data": (_replaces_the_data, lambda weight: (weight.detach()[0, :3].clone(),)),
}


@pytest.mark.parametrize(("function", "inputs"), REFUSED.values(), ids=REFUSED.keys())
def test_a_graph_that_aotautograd_refuses(function, inputs):
    """Dynamo's own graph runs, and the report says why: no plugin has failed."""
    with plugged() as backend:
        fn = compiled(function, backend)
        one, other = (nn.Parameter(rnd(4, 3)) for _ in range(2))
        for _ in range(2):
            given, wanted = inputs(one), inputs(other)
            assert_same(fn(*given), function(*wanted))
            assert_same(given, wanted)
        assert_same(one, other)
        assert not all_trips()
        why = "Dynamo's own graph runs: AOTAutograd can't capture it: "
        assert any(note.startswith(why) for note in last_graph().notes), last_graph().notes
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"RegionError.* stage 'capture'.*on_failure='raise'"):
            compiled(function, backend, on_failure="raise")(*inputs(one))


def test_a_decomposition_that_raises():
    """A plugin's is a failure, though AOTAutograd is who calls it."""

    def raising(x):
        raise NotImplementedError("no sines")

    table = {torch.ops.aten.sin.default: raising}
    with plugged(decompositions=lambda: table) as backend:
        x = rnd(3).requires_grad_()
        assert_same(compiled(lambda x: x.sin() * 2, backend)(x), x.sin() * 2)
    (trip,) = all_trips()
    assert trip.stage == "capture"
    assert "no sines" in trip.error


@pytest.mark.parametrize("policy", ["priority", "measured"])
def test_eagers_result_is_right_whatever_the_fake_one_is(policy):
    """Torch's fake values of quantised tensors are of another dtype than its kernels' results."""

    def quantised(x):
        return torch.quantize_per_tensor(x.exp(), 0.1, 0, torch.quint8)

    x = torch.tensor([0.0, 1.0])
    with plugged(claim=claim_ops("exp")) as fake:
        fn = compiled(quantised, fake, "eager", policy=policy)
        for _ in range(3):
            assert fn(x).int_repr().tolist() == [10, 27]


def test_the_boards_own_errors_are_raised_while_aotautograd_runs():
    with plugged(claim=raising) as backend, pytest.raises(Exception, match=r"RegionError.*'claim'"):
        compiled(f, backend, on_failure="raise")(rnd(3, 4))


def test_a_keyboard_interrupt_is_not_contained():
    """The user means it."""

    def interrupt(results, inputs):
        raise KeyboardInterrupt

    with plugged("bad", call=on_region(interrupt)):
        fn = compiled(f, "bad")
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            fn(rnd(3))
    assert not all_trips()
