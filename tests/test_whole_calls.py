"""A training step end to end: what was compiled, or Dynamo's own graph."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard.contracts import Measurement
from fuseboard.lower import background
from fuseboard.report import choices
from fuseboard.report.data import ledger
from tests.support.backends import all_trips, compiled, last_graph, observing, plugged

QUICK = {"compiles_quickly": True}
COMPILED, EAGER = (10.0, 20.0), (20.0, 10.0)


pytestmark = pytest.mark.usefixtures("policy_measured")


class Net(nn.Module):
    """Weights, running statistics, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return self.down(nn.functional.dropout(self.norm(self.up(x)).relu(), 0.3))


class Stopwatch:
    """Measures as it is told: the forward, the backward, then the whole step."""

    def __init__(self, step: tuple[float, float]) -> None:
        self.answers = [(20.0, 10.0), (20.0, 10.0), step]
        self.asked = 0

    def measure(self, calls):
        self.asked += 1
        for call in calls:
            call()
        return [Measurement(us, us, us, 1) for us in self.answers[self.asked - 1]]


@contextmanager
def timed(step: tuple[float, float]):
    """A measuring hook on the board for the block."""
    stopwatch = Stopwatch(step)
    with observing("stopwatch", measure=lambda calls: stopwatch.measure(calls)):
        yield stopwatch


class Counted:
    """A backend's code that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, eager_call, region):
        def run(args):
            self.calls += 1
            return eager_call(args)

        return run


def steps(fn, model, count=4):
    """Results, gradients and statistics of some steps."""
    found = []
    torch.manual_seed(7)
    x = torch.linspace(-1, 1, 48).reshape(6, 8).requires_grad_()
    for _ in range(count):
        model.zero_grad()
        x.grad = None
        result = fn(x)
        result.square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        buffers = [b.clone() for b in model.buffers()]
        found.append([result.detach(), x.grad.clone(), *grads, *buffers])
    return found


def trained(step, backends=("fake", "eager"), **options):
    """A model through the board, beside its twin in eager; how often the backend ran at the end."""
    model = Net()
    twin = copy.deepcopy(model)
    code = Counted()
    with plugged("fake", call=code, info=QUICK), timed(step) as stopwatch:
        fn = compiled(model, *backends, **options)
        torch.testing.assert_close(steps(fn, model), steps(twin, twin))
        before = code.calls
        torch.testing.assert_close(steps(fn, model, 2), steps(twin, twin, 2))
    return stopwatch.asked, code.calls - before


def test_dynamos_graph_runs_where_it_is_faster_as_a_whole():
    asked, calls = trained(EAGER)
    assert asked == 3
    assert calls == 0
    (note,) = [note for note in last_graph("forward").notes if "together" in note]
    assert note.startswith(
        "forward and backward together take 20.0 µs as compiled and 10.0 µs as Dynamo's own graph"
    )
    assert note.endswith("forward and backward run as Dynamo's own graph under autograd")
    assert all_trips() == []


def test_what_was_compiled_runs_where_it_is_faster_as_a_whole():
    asked, calls = trained(COMPILED)
    assert (asked, calls) == (3, 4)
    (note,) = [note for note in last_graph("forward").notes if "together" in note]
    assert note.endswith(": what was compiled runs")
    for kind in ("forward", "backward"):
        report = last_graph(kind)
        assert (report.instead, {node.backend for node in report.nodes}) == ("", {"fake"})


def test_what_was_compiled_runs_where_it_is_as_fast_as_dynamos_graph_within_the_margin():
    asked, calls = trained((10.1, 10.0))
    assert (asked, calls) == (3, 4)
    (note,) = [note for note in last_graph("forward").notes if "together" in note]
    assert note.endswith(": what was compiled runs, which is close enough")


@pytest.mark.parametrize("later", [False, True], ids=["measured", "taken from the database"])
def test_reports_tell_that_dynamos_graph_runs(later):
    """Forward and backward alike: no op is on what was compiled, and the choice says so."""
    background._unsettled.clear()  # graphs of other tests may never settle
    trained(EAGER)
    if later:
        torch._dynamo.reset()
        ledger.clear()
        model = Net()
        with plugged("fake", info=QUICK), timed(EAGER):
            steps(compiled(model, "fake", "eager"), model)
    assert fuseboard.wait(100)
    for kind in ("forward",) if later else ("forward", "backward"):
        report = last_graph(kind)
        assert (report.regions, report.settled) == ([], True)
        assert {(node.backend, node.reason) for node in report.nodes} == {
            ("eager", "Dynamo's own graph runs")
        }
        assert [row.name for row in report.candidates if row.state == "chosen"] == ["eager"]
        assert choices.why(report) == (
            "Dynamo's own graph runs: forward and backward together take 10.0 µs by it, and "
            "20.0 µs as compiled"
        )


def test_after_a_fork_the_parent_s_child_process_is_left_alone(monkeypatch):
    """A comparison stops what compiles beside it: this process's, which a fork has replaced."""
    paused = []

    class Worker:
        def paused(self):
            paused.append(True)
            return nullcontext()

    monkeypatch.setattr(background, "worker", Worker())
    asked, _ = trained(COMPILED)
    assert len(paused) == asked


@pytest.mark.parametrize(("step", "calls"), [(EAGER, 0), (COMPILED, 12)])
def test_a_later_process_measures_nothing(step, calls):
    trained(step)
    torch._dynamo.reset()
    ledger.clear()
    model = Net()
    twin = copy.deepcopy(model)
    code = Counted()
    with plugged("fake", call=code, info=QUICK), timed(step) as stopwatch:
        fn = compiled(model, "fake", "eager")
        torch.testing.assert_close(steps(fn, model, 6), steps(twin, twin, 6))
    assert stopwatch.asked == 0
    assert code.calls == calls


@pytest.mark.parametrize(
    "options",
    [{"memory_budget": 0.9}, {"backends": ["fake"]}, {"joint_policy": "recompute_all"}],
)
def test_what_the_user_asked_for_is_no_choice(options):
    backends = options.pop("backends", ("fake", "eager"))
    asked, calls = trained(EAGER, backends, **options)
    assert asked in (0, 2)
    assert calls == 4


def test_hooks_and_gradients_of_the_users_see_nothing_of_it():
    model = Net()
    seen = []
    model.up.weight.register_hook(lambda grad: seen.append("weight"))
    x = torch.linspace(-1, 1, 48).reshape(6, 8).requires_grad_()
    x.register_hook(lambda grad: seen.append("input"))
    with plugged("fake", info=QUICK), timed(EAGER):
        fn = compiled(model, "fake", "eager")
        for _ in range(4):
            fn(x).sum().backward()
    assert any("together" in note for note in last_graph("forward").notes)
    assert sorted(seen) == ["input"] * 4 + ["weight"] * 4
    torch.testing.assert_close(model.norm.num_batches_tracked, torch.tensor(4))


def test_inputs_that_may_not_be_copied_are_left_alone():
    """A written input that shares its memory with another one."""

    def f(x, total, part):
        total.add_(1)
        return (x * total * part).sum()

    def run(fn):
        total = torch.ones(4)
        found = []
        for _ in range(4):
            x = torch.arange(4.0).requires_grad_()
            fn(x, total, total[1:2]).backward()
            found.append([x.grad, total.clone()])
        return found

    with plugged("fake", info=QUICK), timed(EAGER):
        torch.testing.assert_close(run(compiled(f, "fake", "eager")), run(f))


def test_a_hook_that_measures_wrongly_leaves_what_was_compiled():
    stopwatch = Stopwatch(EAGER)
    stopwatch.answers.pop()
    model = Net()
    twin = copy.deepcopy(model)
    with (
        plugged("fake", info=QUICK),
        observing("stopwatch", measure=lambda calls: stopwatch.measure(calls)),
    ):
        fn = compiled(model, "fake", "eager")
        torch.testing.assert_close(steps(fn, model), steps(twin, twin))
    (note,) = [note for note in last_graph("forward").notes if "as a whole" in note]
    assert "IndexError" in note


def test_code_that_writes_while_whole_steps_are_timed():
    """What it did to a weight is undone; Dynamo's own graph runs, and the backend is named."""
    model, writes = Net(), []

    def call(eager_call, region):
        def run(args):
            if writes and region.kind == "forward":
                model.up.weight.data.zero_()
            return eager_call(args)

        return run

    def measure(calls):
        stopwatch.asked == 2 and writes.append(True)
        return stopwatch.measure(calls)

    twin, stopwatch = copy.deepcopy(model), Stopwatch(COMPILED)
    with plugged("bad", call=call, info=QUICK), observing("stopwatch", measure=measure):
        got = steps(compiled(model, "bad", "eager"), model)
    torch.testing.assert_close(got, steps(twin, twin))
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage, trip.instead) == ("bad", "profile", "Dynamo's own graph")
    assert "it wrote to the inputs [" in trip.error


def test_a_model_that_is_never_differentiated_is_never_compared():
    model = Net()
    with plugged("fake", info=QUICK), timed(EAGER):
        fn = compiled(model, "fake", "eager")
        for _ in range(3):
            fn(torch.ones(6, 8))
    fuseboard.wait()
    assert not any("together" in note for note in last_graph("forward").notes)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_checkpoint_around_the_call_meets_what_it_saved(early_stop):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    twin = copy.deepcopy(model)

    def run(target, inner):
        found = []
        for _ in range(5):
            target.zero_grad()
            x = torch.linspace(-1, 1, 24).reshape(3, 8).requires_grad_()
            with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
                y = torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)
            y.square().sum().backward()
            found.append([y.detach(), x.grad, *(p.grad.clone() for p in target.parameters())])
        return found

    with plugged("fake", info=QUICK), timed(EAGER):
        torch.testing.assert_close(run(model, compiled(model, "fake", "eager")), run(twin, twin))
    (note,) = [note for note in last_graph("forward").notes if "as a whole" in note]
    assert "hooks of saved tensors are set" in note


def test_hooks_of_saved_tensors_see_the_call_alone():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    counts = []
    with plugged("fake", info=QUICK), timed(EAGER):
        fn = compiled(model, "fake", "eager")
        for _ in range(5):
            packed.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                y = fn(torch.ones(3, 8))
            y.sum().backward()
            counts.append(len(packed))
    assert len(set(counts)) == 1


def test_under_autocast_no_casts_pile_up(monkeypatch):
    """torch keeps the cast of a leaf until autocast ends: those of the comparison are let go."""
    cleared, within = [], []
    original = torch.clear_autocast_cache
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: (cleared.append(1), original()))
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    with plugged("fake", info=QUICK), timed(EAGER):
        fn = compiled(model, "fake", "eager")
        for _ in range(5):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                before = len(cleared)
                y = fn(torch.ones(3, 8))
                within.append(len(cleared) - before)  # without autocast's own, at its end
            y.float().sum().backward()
    assert any("together" in note for note in last_graph("forward").notes)
    assert max(within) >= 2  # each call that was timed


def test_what_the_graph_writes_to_is_copied_with_its_strides():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("seen", torch.zeros(8, 8)[::2, ::4])

        def forward(self, x):
            self.seen.add_(1)
            return x * self.weight + self.seen.sum()

    model = Counts()
    twin = copy.deepcopy(model)
    twin.seen = torch.zeros(8, 8)[::2, ::4]
    strides = []

    def noting(eager_call, region):
        def run(args):
            strides.extend(a.stride() for a in args if a.dim() == 2)
            return eager_call(args)

        return run

    with plugged("fake", call=noting, info=QUICK), timed(EAGER):
        fn = compiled(model, "fake", "eager")
        for _ in range(4):
            one, other = fn(torch.ones(4)), twin(torch.ones(4))
            torch.testing.assert_close(one, other)
            one.sum().backward()
    torch.testing.assert_close(model.seen, twin.seen)
    assert set(strides) == {(16, 4)}
