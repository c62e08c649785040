"""Weights that change between calls: preparing them again has to be worth it."""

from __future__ import annotations

import weakref

import pytest
import torch

import fuseboard
from fuseboard.contracts import Measurement
from fuseboard.run import weights as weights_module
from fuseboard.run.weights import WeightSets, any_version
from tests.support.backends import compiled, last_graph, ledger, observing, plugged
from tests.support.values import assert_same
from tests.support.weights import Linear, Scaled, assert_equal, hoisting_by, overwrite


@pytest.fixture(autouse=True)
def _own_sets(monkeypatch):
    """What other tests compiled may still live."""
    ledger.clear()
    monkeypatch.setattr(weights_module, "_all_sets", weakref.WeakSet())


class Slow:
    """Prepares in no time, which counts as 10 s beside calls of 1 s without."""

    def __init__(self, share: float = 1.0, unprepared_s: float = 1.0) -> None:
        self.times = 0
        self.sets = WeightSets(self, limit=8)
        self.sets.share = share
        self.sets.unprepared_s = unprepared_s

    def __call__(self, weights):
        self.times += 1
        return (self.times,)

    def calls(self, weights, number: int) -> str:
        """For each call whether it had prepared values (p) or went without (w)."""
        told = ""
        for _ in range(number):
            told += "w" if self.sets.find_if_worth(weights) is None else "p"
            self.sets.prepare_s = 10.0
        return told

    def use(self, seconds: float) -> None:
        """Let the values have been in use for so long."""
        self.sets.last.made_at -= seconds


def change(weights) -> None:
    with torch.no_grad():
        weights[0].add_(1)


def test_the_first_set_is_prepared_at_once():
    assert Slow().calls((torch.ones(3),), 2) == "pp"


def test_calls_go_without_until_they_have_lost_what_preparing_takes():
    slow, weights = Slow(), (torch.ones(3),)
    slow.calls(weights, 1)
    change(weights)
    assert slow.calls(weights, 12) == "w" * 9 + "ppp"
    assert slow.times == 2


def test_only_what_prepared_values_save_is_lost():
    slow, weights = Slow(share=0.25), (torch.ones(3),)
    slow.calls(weights, 1)
    slow.use(31.0)  # calls of 0.75 s that save 0.25 s each
    change(weights)
    assert slow.calls(weights, 40) == "w" * 39 + "p"


def test_what_pays_within_a_call_is_prepared_at_once():
    slow, weights = Slow(unprepared_s=20.0), (torch.ones(3),)
    for _ in range(5):
        change(weights)
        assert slow.calls(weights, 1) == "p"


def test_weights_that_never_rest_are_never_prepared_again():
    slow, weights = Slow(), (torch.ones(3),)
    slow.calls(weights, 1)
    for _ in range(100):
        change(weights)
        assert slow.calls(weights, 3) == "www"
    assert slow.times == 1


def test_what_was_prepared_from_inference_tensors_serves_no_other_call():
    """They don't tell when they change."""
    slow = Slow()
    slow.sets.version_of = any_version
    with torch.inference_mode():
        weights = (torch.ones(3), torch.ones(3))
    assert slow.calls(weights, 100) == "p" + "w" * 99
    assert slow.sets.unversioned
    assert slow.calls((torch.ones(3),), 11) == "w" * 9 + "pp"
    assert not slow.sets.unversioned
    slow.sets.unprepared_s = 1e3  # a call saves what preparing takes
    assert slow.calls(weights, 5) == "p" * 5
    assert slow.times == 7


def test_a_new_set_waits_by_itself():
    """A second module instance; the first one's values stay."""
    slow, first, second = Slow(), (torch.ones(3),), (torch.ones(3),)
    slow.calls(first, 1)
    assert slow.calls(second, 9) == "w" * 9
    assert slow.calls(first, 1) == "p"
    assert slow.calls(second, 1) == "p"
    assert slow.times == 2


def test_patience_doubles_where_values_go_stale_before_they_have_paid():
    slow, weights = Slow(share=0.5), (torch.ones(3),)
    slow.calls(weights, 1)
    waited = []
    for _ in range(3):  # values are in use for no time at all, and 10 s would have to go by
        change(weights)
        waited.append(slow.calls(weights, 200).index("p"))
    assert waited == [39, 79, 159]


def test_patience_is_lost_once_values_have_paid():
    slow, weights = Slow(share=0.5), (torch.ones(3),)
    slow.calls(weights, 1)
    change(weights)
    assert slow.calls(weights, 40).index("p") == 39
    slow.use(11.0)
    change(weights)
    assert slow.calls(weights, 40).index("p") == 19


@pytest.mark.parametrize("how", ["generic", "packed"])
def test_calls_without_see_every_change(how):
    """They run the user's graph on the weights as they are; the report says so."""
    with hoisting_by(how) as (kind, backend):
        model = kind()
        fn = compiled(model, backend)
        x = model.inputs()
        with torch.no_grad():
            for _ in range(2):
                assert_equal(fn(x), model(x))
            (sets,) = _sets_of(model)
            fuseboard.refresh(model)
            sets.prepare_s, sets.unprepared_s = 1e6, 0.0
            for _ in range(3):
                overwrite(model)
                assert_same(fn(x), model(x))
                model.weight.data.mul_(2)
                assert_same(fn(x), model(x))
            sets.prepare_s = 0.0
            assert_equal(fn(x), model(x))
            assert len(sets) == 1
    (note,) = [note for note in last_graph().notes if "weights change between calls" in note]
    assert "1e+06 s" in note


def _sets_of(model) -> list[WeightSets]:
    return [
        sets
        for sets in list(weights_module._all_sets)
        if any(
            model.weight.data_ptr() in addresses and not entry.dropped  # another one's, long gone
            for addresses, entry in sets._entries.items()
        )
    ]


def test_an_error_of_eagers_own_is_the_users():
    """Where the call went without: it isn't made twice."""
    with plugged("counting") as backend:
        calls = []
        model = Scaled()

        @torch.library.custom_op("fuseboard_tests::may_fail", mutates_args=())
        def may_fail(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if fails:
                raise ValueError("the user's")
            return x.clone()

        @may_fail.register_fake
        def _(x):
            return torch.empty_like(x)

        fails = False

        def function(model, x):
            return may_fail(Scaled.forward(model, x))

        fn = compiled(function, backend)
        x = model.inputs()
        with torch.no_grad():
            for _ in range(2):
                fn(model, x)
            (sets,) = _sets_of(model)
            sets.prepare_s, sets.unprepared_s = 1e6, 0.0
            overwrite(model)
            fails = True
            calls.clear()
            with pytest.raises(ValueError, match="the user's"):
                fn(model, x)
    assert len(calls) == 1
    assert not last_graph().trips


def test_the_measured_default_knows_what_preparing_saves(monkeypatch, tmp_path):
    """By the comparison that its winner has won."""
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path))
    latencies = {"eager": 100.0, "packer": 40.0}
    times = [Measurement(us, us, us, 9) for us in latencies.values()]
    with (
        hoisting_by("packed") as (_, backend),
        observing("stopwatch", measure=lambda calls: times[: len(calls)]),
    ):
        model = Linear()
        fn = compiled(model, backend, "eager", policy="measured", settle="first_call")
        with torch.no_grad():
            fn(model.inputs())
    assert {told.name: told.latency_us for told in last_graph().candidates} == latencies
    (sets,) = _sets_of(model)
    assert sets.share == pytest.approx(0.6)
    assert sets.unprepared_s == pytest.approx(100e-6)
