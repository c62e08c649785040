"""Reports once something else runs than what was planned or chosen: they tell what runs now."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import fuseboard
from fuseboard.backend import fuseboard as backend
from fuseboard.contracts import Measurement
from fuseboard.errors import RegionError
from fuseboard.explanations.text import as_text
from fuseboard.lower.caching import Cache
from fuseboard.profile.choose.stored_decision import StoredDecision
from fuseboard.report import choices
from fuseboard.report.data import ledger
from fuseboard.run import runner
from tests.support.backends import (
    all_trips,
    claim_ops,
    compiled,
    last_graph,
    observing,
    plugged,
)
from tests.support.contained import Boom, boom
from tests.support.values import assert_same, rnd

QUICK = {"compiles_quickly": True}


@pytest.fixture(autouse=True)
def _own_ledger(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))
    ledger.clear()


def f(x):
    return (x.exp() + 1).sum(-1)


class Code:
    """A backend's code that is right until it is told to fail in one way."""

    def __init__(self) -> None:
        self.how = ""

    def __call__(self, eager_call, region):
        def run(args):
            if self.how == "raises":
                boom()
            results = eager_call(args)
            if self.how == "wrong values":
                results = [value + 1 for value in results]
            return [value[:1] for value in results] if self.how == "wrong shape" else results

        return run


def fastest(*order: str):
    """A measuring hook's answer by which the second, compared with eager, is the fastest."""
    return lambda calls: [Measurement(us, us, us, 1) for us in (200.0, 100.0, 300.0)[: len(calls)]]


# --- one region is all there is -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["raises", "wrong values", "wrong shape"])
@pytest.mark.parametrize("policy", ["priority", "measured"])
def test_after_a_trip_in_a_call_the_report_has_eager(policy, how):
    """In its regions, in each op with the reason, and in the choice."""
    code, x = Code(), rnd(4, 6)
    with (
        observing("stopwatch", measure=fastest()),
        plugged("fake", call=code, info=QUICK),
        torch.no_grad(),
    ):
        fn = compiled(f, "fake", "eager", policy=policy, verify="always")
        for _ in range(3):
            assert_same(fn(x), f(x))
        report = last_graph()
        assert {node.backend for node in report.nodes} == {"fake"}
        code.how = how
        for _ in range(2):
            assert_same(fn(x), f(x))
    (trip,) = report.trips
    assert [region.backend for region in report.regions] == ["eager"]
    assert {(node.backend, node.reason) for node in report.nodes} == {
        ("eager", "fake tripped in a call")
    }
    text = " ".join(as_text(fuseboard.last_report()).split())
    assert "3 ops: 3 on eager" in text
    if policy == "measured":
        assert {row.name: row.state for row in report.candidates} == {
            "eager": "chosen",
            "fake": "failed",
        }
        why = "eager runs in place of fake, which was chosen and tripped in a call"
        assert choices.why(report) == why
        assert f"choice: {why}" in text
        assert f"{why}." in fuseboard.last_report().to_html()
        assert fuseboard.last_report().as_dict()["graphs"][0]["why"] == why
        assert text.count(trip.error[:40]) == 1


def test_a_trip_is_kept_while_no_thread_waits(monkeypatch):
    """A disk or another machine, which later processes hear of it from, may be slow."""
    code, x, held = Code(), rnd(4, 6), []

    def keep(self, name, problem):
        held.extend(one.lock._is_owned() for one in runner.living)

    monkeypatch.setattr(StoredDecision, "record_trip", keep)
    with observing("stopwatch", measure=fastest()), plugged("fake", call=code, info=QUICK):
        with torch.no_grad():
            fn = compiled(f, "fake", "eager", policy="measured", verify="always")
            fn(x)
            code.how = "raises"
            assert_same(fn(x), f(x))
    assert held
    assert not any(held)


def test_a_backward_that_trips_is_told_in_its_own_report():
    """What runs in its place runs from the next call on."""
    code = Code()
    with plugged("fake", call=code):
        fn = compiled(lambda x: x.sin().exp(), "fake")
        for how in ("", "raises", "", ""):
            code.how = how
            x = rnd(3).requires_grad_()
            y = fn(x).sum()
            if how:
                code.how = how
                with pytest.raises(RegionError, match="saved tensors are gone"):
                    y.backward()
            else:
                y.backward()
    report = last_graph("backward")
    assert {node.backend for node in report.nodes if node.region} == {"eager"}


# --- some of several regions ----------------------------------------------------------------------


def test_the_region_that_tripped_is_told_beside_those_that_did_not():
    code, x = Code(), rnd(4, 6)

    def g(x):
        return (x.exp() @ x.t()).relu().sum(-1)

    with (
        observing("stopwatch", measure=lambda calls: [_us(len(calls) - i) for i in _each(calls)]),
        plugged("one", call=code, claim=claim_ops("exp"), info=QUICK),
        plugged("two", claim=claim_ops("relu", "sum"), info=QUICK),
        torch.no_grad(),
    ):
        fn = compiled(g, "one", "two", "eager", policy="measured", min_region_us=0.0)
        for _ in range(2):
            assert_same(fn(x), g(x))
        report = last_graph()
        (chosen,) = [row.name for row in report.candidates if row.state == "chosen"]
        assert chosen == "one+eager+two"
        code.how = "raises"
        for _ in range(2):
            assert_same(fn(x), g(x))
    assert [region.backend for region in report.regions] == ["eager", "eager", "two"]
    assert [node.backend for node in report.nodes if node.op == "aten.exp.default"] == ["eager"]
    assert choices.why(report) == "eager runs region0 since one tripped there in a call"
    assert [row.state for row in report.candidates if row.name == chosen] == ["chosen"]


def _each(calls):
    return range(len(calls))


def _us(us: float) -> Measurement:
    return Measurement(us, us, us, 1)


def test_regions_that_share_their_code_are_told_together():
    """Repeated blocks are lowered once, so they trip once."""

    kinds = (nn.Tanh, nn.Sigmoid, nn.SiLU, nn.GELU, nn.ReLU, nn.Softplus)
    blocks = [[op for kind in kinds for op in (nn.Linear(8, 8), kind())] for _ in range(4)]
    model, code, x = nn.Sequential(*(nn.Sequential(*ops) for ops in blocks)), Code(), rnd(3, 8)
    with plugged("fake", call=code), torch.no_grad():
        fn = compiled(model, "fake", "eager", policy="priority", repeats="always")
        assert_same(fn(x), model(x))
        assert [bool(r.same_as) for r in last_graph().regions] == [False, True, True, True]
        code.how = "raises"
        for _ in range(3):
            assert_same(fn(x), model(x))
    report = last_graph()
    assert {region.backend for region in report.regions} == {"eager"}
    assert {node.backend for node in report.nodes} == {"eager"}
    assert len(report.trips) == 1


# --- eager itself ---------------------------------------------------------------------------------


def other_strides(eager_call, region):
    def run(args):
        (result,) = eager_call(args)
        return [result.t().contiguous().t()]

    return run


def flat(x):
    return x.exp().view(-1).sin()


def test_where_eager_fails_on_what_others_made_the_graph_runs_as_captured():
    """The values are right, and nobody asked for an exception."""
    x = rnd(4, 6)
    with plugged("fake", call=other_strides, claim=claim_ops("exp")), torch.no_grad():
        fn = compiled(flat, "fake", "eager", policy="priority", verify="off", min_region_us=0.0)
        for _ in range(2):
            assert_same(fn(x), flat(x))
    report = last_graph()
    (trip,) = report.trips
    assert (trip.plugin, trip.instead) == ("eager", "the whole graph in eager, as captured")
    assert report.regions == []
    assert {node.backend for node in report.nodes} == {"eager"}


def test_where_that_is_raised_the_message_says_who_wants_it():
    x = rnd(4, 6)
    with plugged("fake", call=other_strides, claim=claim_ops("exp")), torch.no_grad():
        fn = compiled(
            flat, "fake", "eager", verify="off", min_region_us=0.0, policy="priority",
            on_failure="raise",
        )  # fmt: skip
        with pytest.raises(RegionError, match="Not contained: the policy is on_failure='raise', "):
            fn(x)


def test_a_hook_that_answers_raise_is_named():
    """Nobody set the setting."""
    with (
        observing("judge", on_failure=lambda: "raise"),
        plugged("bad", lower=lambda: boom()),
        torch.no_grad(),
        pytest.raises(Exception, match="fuseboard_on_failure of 'judge' answered 'raise'") as got,
    ):
        compiled(f, "bad", policy="priority")(rnd(3, 4))
    assert "on_failure='raise'" not in str(got.value)


def test_where_eager_cannot_be_lowered_nobody_is_told_of_a_policy(monkeypatch):
    def lower(self, task, told):
        raise Boom("not even eager")

    monkeypatch.setattr(Cache, "lower", lower)
    with torch.no_grad(), pytest.raises(Exception, match="not even eager") as got:
        compiled(f, policy="priority")(rnd(3, 4))
    assert "eager is what all else falls back to" in str(got.value)
    assert "on_failure" not in str(got.value)


def test_where_no_candidate_is_right_eager_runs_and_every_op_says_so():
    """All raise while they are timed, though each was right before that."""

    def once(eager_call, region):
        calls = []

        def run(args):
            calls.append(1)
            return boom() if len(calls) > 1 else eager_call(args)

        return run

    x = rnd(4, 6)
    with (
        plugged("one", call=once, info=QUICK),
        plugged("two", call=once, info=QUICK),
        torch.no_grad(),
    ):
        fn = compiled(f, "one", "two", policy="measured")
        for _ in range(3):
            assert_same(fn(x), f(x))
    report = last_graph()
    assert report.regions == []
    assert len(report.nodes) == 3
    assert {node.backend for node in report.nodes} == {"eager"}
    assert choices.why(report) == "no candidate was right: eager runs"


# --- anomaly mode ---------------------------------------------------------------------------------


def root(x):
    return (x.sqrt() * x).sum()


def step_into_nans(fn):
    """What torch's anomaly mode tells while a step makes NaNs, and that step's exception."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fn(torch.tensor([-1.0, 2.0], requires_grad=True))
        with pytest.raises(RuntimeError, match="returned nan values"):
            result.backward()
    return [str(one.message) for one in caught if "Error detected in" in str(one.message)]


def test_in_anomaly_mode_the_users_error_is_told_once():
    """By the user's own backward: what the board runs of it while it compiles is silent."""
    with plugged("fake"), torch.autograd.set_detect_anomaly(True):
        assert len(step_into_nans(compiled(root, "fake", "eager"))) == 1
        assert torch.is_anomaly_enabled()
    assert not all_trips()
    assert not any("not held against" in note for note in last_graph("forward").notes)


def test_in_anomaly_mode_whole_steps_are_compared_silently():
    with plugged("fake", info=QUICK), torch.autograd.set_detect_anomaly(True):
        fn = compiled(root, "fake", "eager", policy="measured", measure_s=0.05)
        fn(torch.tensor([1.0, 2.0], requires_grad=True)).backward()
        assert len(step_into_nans(fn)) == 1
        assert torch.is_anomaly_enabled()
    assert any("together take" in note for note in last_graph("forward").notes)


# --- graphs whose function isn't known ------------------------------------------------------------


def of_no_frame(function, *inputs):
    """As compiled autograd calls a backend: under a tracing context that names no code."""
    traced = torch.fx.symbolic_trace(function)
    with torch._guards.tracing(torch._guards.TracingContext(FakeTensorMode())):
        return backend(traced, list(inputs), options={"backends": ["eager"]})


def shift(x, y):
    x.add_(1)
    return (x * y,)


def test_a_note_on_overlap_is_in_the_report_of_its_own_graph():
    with torch.no_grad():
        one, other = (of_no_frame(shift, rnd(4), rnd(4)) for _ in range(2))
        x = rnd(4)
        one(x, x)
        other(rnd(4), rnd(4))
    noted = [any("overlapped" in note for note in report.notes) for report in ledger.graphs()]
    assert noted == [True, False]


def test_the_newest_compile_is_not_mixed_up_with_another_one():
    """A backward that is compiled late belongs to its own forward."""
    first = of_no_frame(lambda x: (x.sin(),), rnd(3).requires_grad_())
    second = of_no_frame(lambda x: (x.exp(),), rnd(3).requires_grad_())
    second(rnd(3).requires_grad_())
    first(rnd(3).requires_grad_())[0].sum().backward()
    graphs = fuseboard.last_report().graphs
    assert [graph.kind for graph in graphs] == ["joint", "forward", "backward"]
    assert [node.op for node in graphs[1].nodes] == ["aten.sin.default"]
