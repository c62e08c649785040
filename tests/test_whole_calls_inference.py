"""Inference graphs end to end: what was compiled, or Dynamo's own graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fuseboard.profile.choose import whole_calls
from fuseboard.report.data import ledger
from tests.support.backends import all_trips, compiled, last_graph, observing, plugged
from tests.test_whole_calls import COMPILED, EAGER, QUICK, Counted, Stopwatch

pytestmark = pytest.mark.usefixtures("policy_measured")


class Cache(nn.Module):
    """Writes where a counter points, as a cache of keys and values does."""

    def __init__(self, room: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))
        self.register_buffer("kept", torch.zeros(room, 8))

    def forward(self, x):
        self.kept.index_copy_(0, self.at, self.inner(x))
        self.at.add_(1)
        return self.kept.relu().sum(0)


def calls(fn, model, count):
    found = []
    for i in range(count):
        result = fn(torch.linspace(-i, 1, 8).reshape(1, 8))
        found.append([result, *(b.clone() for b in model.buffers())])
    return found


def run(whole, mode=torch.no_grad, model=None, first=4):
    """A model through the board, beside its twin in eager; how often the backend ran at the end."""
    model = Cache() if model is None else model
    twin = copy.deepcopy(model)
    code = Counted()
    stopwatch = Stopwatch(whole)
    stopwatch.answers = [(20.0, 10.0), whole]
    with (
        plugged("fake", call=code, info=QUICK),
        observing("stopwatch", measure=lambda calls: stopwatch.measure(calls)),
        mode(),
    ):
        fn = compiled(model, "fake", "eager")
        torch.testing.assert_close(calls(fn, model, first), calls(twin, twin, first))
        before = code.calls
        torch.testing.assert_close(calls(fn, model, 2), calls(twin, twin, 2))
    assert all_trips() == []
    return stopwatch.asked, code.calls - before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("whole", "expected"), [(EAGER, 0), (COMPILED, 2)])
def test_calls_that_write_to_inputs_run_as_what_is_faster(mode, whole, expected):
    assert run(whole, mode) == (2, expected)
    (note,) = [note for note in last_graph("inference").notes if "whole calls" in note]
    times = "20.0 µs as compiled and 10.0" if whole == EAGER else "10.0 µs as compiled and 20.0"
    assert note.startswith(f"whole calls take {times}")
    end = "calls run as Dynamo's own graph" if whole == EAGER else "what was compiled runs"
    assert note.endswith(end)
    report = last_graph("inference")
    home = "eager" if whole == EAGER else "fake"
    assert {node.backend for node in report.nodes} == {home}
    assert report.instead.startswith("Dynamo's own graph runs: whole" if whole == EAGER else "")


@pytest.mark.parametrize(("whole", "expected"), [(EAGER, 0), (COMPILED, 2)])
def test_a_later_process_measures_no_whole_calls(whole, expected):
    run(whole)
    torch._dynamo.reset()
    ledger.clear()
    assert run(whole) == (0, expected)


def test_where_dynamos_graph_is_a_candidate_nothing_more_is_timed():
    class Plain(nn.Sequential):
        pass

    assert run(EAGER, model=Plain(nn.Linear(8, 8), nn.ReLU())) == (1, 2)


def test_results_that_are_views_of_inputs_are_compared_as_well():
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(x), x[0]

    model = Views()
    stopwatch = Stopwatch(EAGER)
    stopwatch.answers = [(20.0, 10.0), EAGER]
    with (
        plugged("fake", info=QUICK),
        observing("stopwatch", measure=lambda calls: stopwatch.measure(calls)),
        torch.no_grad(),
    ):
        fn = compiled(model, "fake", "eager")
        for _ in range(3):
            x = torch.ones(2, 8)
            whole, part = fn(x)
            torch.testing.assert_close([whole, part], list(model(x)))
            assert part.data_ptr() == x.data_ptr()
    assert any("whole calls" in note for note in last_graph("inference").notes)


def test_what_has_no_room_for_copies_is_left_as_it_was_compiled(monkeypatch):
    monkeypatch.setattr(whole_calls, "free_bytes", lambda device: 100)
    assert run(EAGER) == (1, 2)
    (note,) = [note for note in last_graph("inference").notes if "as a whole" in note]
    assert "more than half of the free memory" in note


def test_a_backward_that_compiled_autograd_compiles_keeps_its_list_of_inputs():
    """A call empties it, so two that are timed would leave nothing to the user's own."""
    model = nn.Linear(4, 3)
    x = torch.ones(5, 4)
    wanted = torch.autograd.grad(model(x).square().sum(), tuple(model.parameters()))
    with plugged("quick", info=QUICK):
        fn = compiled(model, "quick", "eager")
        backward = torch.compile(backend="fuseboard", options={"backends": ["quick", "eager"]})
        with torch._dynamo.compiled_autograd._enable(backward):
            for _ in range(12):
                model.zero_grad()
                fn(x).square().sum().backward()
                grads = [parameter.grad for parameter in model.parameters()]
                torch.testing.assert_close(grads, list(wanted))
    assert not all_trips()
