"""``fuseboard_wrap``: what plugins put around regions that other backends lowered."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from pydantic import BaseModel

import fuseboard
from fuseboard.board.registry import BUILT_IN
from fuseboard.config import resolve
from fuseboard.errors import RegionError, SettingsError
from fuseboard.report.data import ledger
from tests.board_fakes import FakeEntryPoint, a_board, backend
from tests.support.backends import all_trips, compiled, last_graph, observing, plugged
from tests.support.contained import Boom, boom, check, f, train
from tests.support.values import rnd


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    ledger.clear()


def counting(counts: list[str], name: str = "wrapper", note: str = "") -> Any:
    """A hook whose call notes that it ran."""

    def wrap(lowered, region):
        def call(args):
            counts.append(name)
            return lowered.call(args)

        return fuseboard.LoweredRegion(call=call, notes=(note,) if note else ())

    return wrap


def test_every_call_of_a_region_goes_through_the_wrapper():
    """The region keeps its backend; the report says by whom it is wrapped, and what it noted."""
    counts: list[str] = []
    with plugged("fake"), observing("wrapper", wrap=counting(counts, note="as told")):
        check(compiled(f, "fake"), rnd(3, 5))
    (region,) = last_graph().regions
    assert counts == ["wrapper"] * 5  # three calls, of which the first is checked by two more
    assert region.backend == "fake"
    assert region.notes == ["as told", "wrapped by wrapper"]
    assert all_trips() == []


def test_forward_and_backward_are_wrapped():
    """In training as well."""
    counts: list[str] = []
    with observing("wrapper", wrap=counting(counts)):
        train(compiled(f), f, rnd(3, 5))
    assert counts == ["wrapper"] * 2


def test_wrappers_are_given_what_the_one_before_made():
    """Plugins in order: the last is the outermost."""
    counts: list[str] = []
    with (
        observing("one", wrap=counting(counts, "one")),
        observing("two", wrap=counting(counts, "two")),
    ):
        check(compiled(f), rnd(3), calls=1)
    assert counts == ["two", "one"]
    assert last_graph().regions[0].notes == ["wrapped by one", "wrapped by two"]


def test_leaving_a_region_alone_can_have_a_reason():
    """None says nothing; the same call with a note is the reason, once."""

    def reason(lowered):
        return dataclasses.replace(lowered, notes=(*lowered.notes, "not worth it"))

    with observing("silent", wrap=lambda: None), observing("talkative", wrap=reason):
        check(compiled(f), rnd(3))
    assert last_graph().regions[0].notes == ["not worth it"]


def test_the_wrapper_sees_the_graph_that_was_lowered():
    """After the backend's rewrites, though the backend has changed its own copy since; the
    placeholders are what the call is given, prepared values included."""
    seen: list[tuple[list[str], int, tuple[int, ...]]] = []

    def lower(region):
        call = fuseboard.lower_eagerly(region).call
        for node in reversed(region.graph.graph.nodes):
            region.graph.graph.erase_node(node)
        return fuseboard.LoweredRegion(call=call)

    def wrap(lowered, region):
        ops = [str(node.target) for node in region.graph.graph.find_nodes(op="placeholder")]
        targets = [str(n.target) for n in region.graph.graph.nodes if n.op == "call_function"]

        def call(args):
            seen.append((targets, len(args), region.static_inputs))
            assert len(args) == len(ops)
            return lowered.call(args)

        return fuseboard.LoweredRegion(call=call)

    def scaled(x, w):
        return x @ w.tanh()

    weight = torch.nn.Parameter(rnd(300, 400))
    x = rnd(3, 300)
    with plugged("fake", lower=lower), observing("wrapper", wrap=wrap), torch.no_grad():
        net = torch.nn.Module()
        net.weight = weight
        net.forward = lambda x: scaled(x, net.weight)
        torch.testing.assert_close(compiled(net, "fake")(x), scaled(x, weight))
    targets, count, static = seen[-1]
    assert targets == ["aten.mm.default"]
    assert count == 2
    assert len(static) == 1


def test_options_are_the_wrappers_own():
    """``region.options`` stay the backend's."""

    class Own(BaseModel):
        level: int = 1

    class Others(BaseModel):
        level: int = 5

    seen: list[Any] = []

    def wrap(region, options):
        seen.append((options.level, region.options.level))

    wrapper = backend("wrapper", {"wrap": wrap}, wraps_only=True, options=Own)
    fuseboard.register(wrapper)
    try:
        with plugged("fake", info={"options": Others}):
            check(compiled(f, "fake", plugins={"wrapper": {"level": 3}}), rnd(3))
    finally:
        fuseboard.unregister("wrapper")
    assert seen == [(3, 5)]


# --- when it fails ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [boom, lambda: "a graph"], ids=["raises", "wrong answer"])
def test_a_hook_that_fails_trips_and_the_region_runs_without_it(wrap):
    """On its own backend."""
    with plugged("fake"), observing("wrapper", wrap=lambda: wrap()):
        check(compiled(f, "fake"), rnd(3, 5))
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage, trip.instead) == ("wrapper", "lower", "fake without wrapper")
    assert last_graph().regions[0].backend == "fake"


def test_a_hook_that_fails_can_be_raised():
    """By the policy; the error names the wrapper, not the backend."""
    with plugged("fake"), observing("wrapper", wrap=lambda: boom()):
        with pytest.raises(Exception, match="the engine exploded") as caught:
            compiled(f, "fake", on_failure="raise")(rnd(3))
    assert "plugin 'wrapper' failed in stage 'lower'" in str(caught.value)
    assert "plugin 'fake'" not in str(caught.value)


def telling(what: Any, calls: int = 2) -> Any:
    """A hook that tells something in the second call, and then calls the region as it was."""

    def wrap(lowered, tell):
        count = [0]

        def call(args):
            count[0] += 1
            if count[0] == calls:
                tell(what)
            return lowered.call(args)

        return fuseboard.LoweredRegion(call=call)

    return wrap


def test_a_failure_that_the_wrapper_contained_is_a_trip():
    """Told in a call: plugin, stage, region, and what ran instead."""
    with plugged("fake"), observing("wrapper", wrap=telling(Boom("no capture"))):
        check(compiled(f, "fake"), rnd(3, 5))
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage, trip.instead) == ("wrapper", "run", "fake without wrapper")
    assert trip.error == "Boom: no capture"
    assert trip.region == last_graph().regions[0].name


def test_a_contained_failure_is_raised_if_the_policy_says_so():
    """Even in a backward, whose call can't be repeated."""
    for example in (rnd(3), rnd(3).requires_grad_()):
        torch._dynamo.reset()
        with observing("wrapper", wrap=telling(Boom("no capture"), calls=1)):
            with pytest.raises(RegionError, match="no capture"):
                compiled(f, on_failure="raise")(example).sum().backward()


def test_a_note_may_be_told_in_a_call():
    """Once, however often it is told."""

    def wrap(lowered, tell):
        def call(args):
            tell("gave up")
            return lowered.call(args)

        return fuseboard.LoweredRegion(call=call)

    with observing("wrapper", wrap=wrap):
        check(compiled(f), rnd(3))
    assert last_graph().regions[0].notes == ["wrapped by wrapper", "gave up"]


# --- plugins that only wrap ---------------------------------------------------------------------


def test_what_only_wraps_has_no_place_among_the_backends():
    """Not by default, not by name; it takes part all the same."""
    point = FakeEntryPoint(
        "wrapper", backend("wrapper", {"wrap": lambda: None}, wraps_only=True, training=True)
    )
    board = a_board(point)
    opened = board.session(resolve())
    assert [info.name for info in opened.backends] == ["eager"]
    assert opened.with_hook("fuseboard_wrap") == ("wrapper",)
    with pytest.raises(SettingsError, match="'wrapper' has no backend, it takes part in other"):
        board.session(resolve({"backends": ["wrapper", "eager"]}))
    passes = sorted(BUILT_IN.keys() - {"eager"})
    assert [state.name for state in board.states()] == ["eager", *passes, "wrapper"]


def test_an_unavailable_wrapper_is_not_asked():
    """Options that it was given are noted for every report, with the reason."""

    class Own(BaseModel):
        level: int = 1

    wrapper = backend(
        "wrapper",
        {"wrap": lambda: boom()},
        wraps_only=True,
        available=False,
        reason="no GPU",
        options=Own,
    )
    board = a_board(FakeEntryPoint("wrapper", wrapper))
    assert board.session(resolve()).notes == []
    opened = board.session(resolve({"plugins.wrapper.level": 2}))
    assert opened.with_hook("fuseboard_wrap") == ()
    assert opened.notes == [
        "plugins.wrapper, set in torch.compile(options=), does nothing: 'wrapper' is unavailable: "
        "no GPU"
    ]
