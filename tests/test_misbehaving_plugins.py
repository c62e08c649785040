"""A plugin may do anything: the answer is eager's, the process as it was, and a trip names it."""

from __future__ import annotations

import logging

import pytest
import torch

from fuseboard.torch_api.state import PARTS, StateChange, read_state
from tests.support.backends import all_trips, plugged
from tests.support.contained import LIMIT_S
from tests.support.misbehaving import CHANGES, ENDS, change_surroundings, plugin_that
from tests.support.values import assert_same, rnd

#: How the settings come to a plugin: it is all there is, one of several, or just installed.
SETTINGS = {
    "alone": {"backends": ["bad"]},
    "named": {"backends": ["bad", "eager"]},
    # Others are blocked, since they take their time.
    "installed": {"block": ["inductor", "mkldnn", "onnxruntime"]},
}
#: (what is done, where): its function, and what is told of it.
WAYS = {
    **{(name, where): way for where in ("lower", "call") for name, way in CHANGES.items()},
    **{(name, where): way for where in ("lower", "call") for name, way in ENDS.items()},
    **{(name, where): ENDS[name] for where in ("claim", "fuse") for name in ("exit", "hang")},
    **{(name, where): CHANGES[name] for where in ("claim", "fuse") for name in ("threads", "mode")},
}


pytestmark = pytest.mark.usefixtures("policy_measured")


def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ y).sum(1)


def changes_since(before: list[object]) -> list[str]:
    """What differs from the state before, as people read it."""
    pairs = zip(PARTS, before, read_state(), strict=True)
    return [str(StateChange(part, was, now)) for part, was, now in pairs if was != now]


def calls_are_eagers(compiled, number: int = 5) -> None:
    x, y = rnd(4, 3), rnd(3, 5)
    own = x.clone(), y.clone()
    before = read_state()
    for _ in range(number):
        assert_same(compiled(x, y), f(*own))
    assert not changes_since(before)
    assert_same((x, y), own)


def compile_with(settings, **options):
    more = {"hook_limit_s": LIMIT_S, "measure_s": 0.01, **options}
    return torch.compile(f, backend="fuseboard", options={**SETTINGS[settings], **more})


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("way", WAYS, ids=" in ".join)
def test_whatever_a_plugin_does_eager_answers_and_a_trip_says_what_it_did(way, settings):
    """The inputs and the process are as before."""
    does, told = WAYS[way]
    with plugin_that(does, way[1]), torch.no_grad():
        calls_are_eagers(compile_with(settings))
    trips = [trip for trip in all_trips() if trip.plugin == "bad"]
    assert trips
    assert any(part in trips[0].error for part in told.split("|")), trips


@pytest.mark.parametrize("name", ["threads", "exit", "level"])
def test_so_it_is_in_training(name):
    """Forward and backward are eager's, and the process is as before."""
    does, told = {**CHANGES, **ENDS}[name]
    x, y = rnd(4, 3).requires_grad_(), rnd(3, 5).requires_grad_()
    expected = torch.autograd.grad(f(x, y).sum(), (x, y))
    before = read_state()
    with plugin_that(does, "call"):
        compiled = compile_with("named")
        for _ in range(4):
            torch.testing.assert_close(torch.autograd.grad(compiled(x, y).sum(), (x, y)), expected)
    assert not changes_since(before)
    assert {trip.plugin for trip in all_trips()} == {"bad"}
    assert told in all_trips()[0].error


@pytest.mark.parametrize("name", ["exit", "threads"])
def test_an_observer_that_misbehaves_is_told_once(name, caplog):
    """It decides nothing, so its backend stays."""
    does, told = {**CHANGES, **ENDS}[name]
    with plugin_that(does, "event"), torch.no_grad(), caplog.at_level(logging.WARNING, "fuseboard"):
        calls_are_eagers(compile_with("named"))
    (said,) = [r.getMessage() for r in caplog.records if "fuseboard_event" in r.getMessage()]
    assert "'bad'" in said
    assert told in said


def test_what_engines_do_when_they_are_imported_is_put_back_without_a_trip(caplog):
    """The environment and silenced logs are told of; numbers that were drawn aren't missed."""
    with plugin_that(change_surroundings, "lower"), torch.no_grad():
        with caplog.at_level(logging.INFO, "fuseboard"):
            calls_are_eagers(compile_with("alone"))
    assert not all_trips()
    said = "bad changed logging.disable from 0 to 50; os.environ['FAKE_ENGINE'] in fuseboard_lower"
    assert f"{said}: put back" in caplog.text


def test_regions_may_draw_random_numbers():
    """The numbers of a region are eager's, call by call."""
    with plugged("honest", info={"compiles_quickly": True}), torch.no_grad():
        compiled = torch.compile(
            lambda x: torch.nn.functional.dropout(x, 0.5),
            backend="fuseboard",
            options={"backends": ["honest"], "measure_s": 0.01},
        )
        torch.manual_seed(0)
        results = [compiled(torch.ones(16)) for _ in range(4)]
        torch.manual_seed(0)
        assert_same(results, [torch.nn.functional.dropout(torch.ones(16), 0.5) for _ in range(4)])
