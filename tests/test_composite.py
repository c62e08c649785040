"""The composite: each piece of a graph where it is fastest."""

from __future__ import annotations

import time

import pytest
import torch

import fuseboard
from fuseboard.config import resolve
from fuseboard.profile.costs.database import database
from fuseboard.report.data import ledger
from tests.support.backends import (
    all_trips,
    claim_ops,
    compiled,
    forget_other_graphs,
    last_graph,
    observing,
    plugged,
)

QUICK = {"compiles_quickly": True}


@pytest.fixture(autouse=True)
def _measured(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEBOARD_POLICY", "measured")
    monkeypatch.setenv("FUSEBOARD_CACHE_DIR", str(tmp_path / "cache"))
    forget_other_graphs(monkeypatch)


W = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
X = torch.linspace(-1, 1, 32).reshape(4, 8)


def f(x):
    return ((x @ W).relu() @ W.t()).tanh().sum(-1)


def slow_at(*ops: str, seconds: float = 0.01, otherwise=None):
    """A fake's code that takes long wherever one of these ops is in it."""

    def call(eager_call, region):
        found = {getattr(n.target, "_opname", "") for n in region.graph.graph.nodes}
        slow = not found.isdisjoint(ops)
        if otherwise is not None and not region.whole:
            return otherwise(eager_call, region)

        def run(args):
            if slow:
                time.sleep(seconds)
            return eager_call(args)

        return run

    return call


def both(otherwise=None):
    """Two backends of which each is slow at one half of ``f``."""
    left = plugged("left", call=slow_at("tanh", otherwise=otherwise), info=QUICK)
    return left, plugged("right", call=slow_at("relu"), info=QUICK)


def states() -> dict[str, str]:
    return {told.name: told.state for told in last_graph().candidates}


def call_settled(fn, *args):
    with torch.no_grad():
        fn(*args)
    fuseboard.wait()
    with torch.no_grad():
        return fn(*args)


def test_each_piece_runs_where_it_is_fastest():
    left, right = both()
    with left, right:
        fn = compiled(f, "left", "right", measure_s=0.1)
        torch.testing.assert_close(call_settled(fn, X), f(X))
    assert states() == {"left": "slower", "right": "slower", "composite": "chosen"}
    graph = last_graph()
    assert graph.settled
    assert [region.backend for region in graph.regions] == ["left", "right"]
    homes = {node.op.split(".")[-2]: node.backend for node in graph.nodes}
    assert homes["relu"] == "left"
    assert homes["tanh"] == homes["sum"] == "right"
    assert "chosen by what pieces like this take: left" in next(n.reason for n in graph.nodes)
    assert all_trips() == []


def test_a_later_process_measures_nothing():
    def compile_it():
        torch._dynamo.reset()
        ledger.clear()
        return compiled(f, "left", "right", measure_s=0.1)

    measured = []

    def measure(calls):
        measured.append(len(calls))

    left, right = both()
    with left, right, observing("onlooker", measure=measure):
        call_settled(compile_it(), X)
        assert len(measured) == 4  # both alone, two kinds of pieces, then with the composite
        assert "composite" in states()
        measured.clear()
        with torch.no_grad():
            torch.testing.assert_close(compile_it()(X), f(X))
    assert measured == []
    assert last_graph().decided == "taken from the cost database"
    assert [region.backend for region in last_graph().regions] == ["left", "right"]


def test_equal_pieces_are_measured_once_and_for_other_graphs_too():
    measured = []
    left, right = both()

    def deep(x):
        return f(((x @ W).relu() @ W).relu().relu())

    with left, right, observing("onlooker", measure=lambda calls: measured.append(len(calls))):
        call_settled(compiled(f, "left", "right", measure_s=0.1), X)
        measured.clear()
        call_settled(compiled(deep, "left", "right", measure_s=0.1), X)
    assert len(measured) == 3  # one kind is new: relu twice
    assert states()["composite"] == "chosen"


def test_where_one_backend_is_fastest_everywhere_it_runs_alone():
    slow = plugged("slow", call=slow_at("mm", seconds=0.02), info=QUICK)
    with slow, plugged("brisk", call=slow_at("mm"), info=QUICK):
        call_settled(compiled(f, "slow", "brisk", measure_s=0.1), X)
    composite = last_graph().candidates[-1]
    assert (composite.name, composite.state) == ("composite", "untried")
    assert composite.problem == "its pieces take 0.0% less at best than with brisk alone"
    assert last_graph().settled
    assert states()["brisk"] == "chosen"


def test_short_calls_are_left_as_they_are():
    with plugged("left", info=QUICK), plugged("right", info=QUICK):
        call_settled(compiled(f, "left", "right", measure_s=0.1), X)
    assert "composite" not in states()


def test_what_takes_long_to_compile_takes_no_part():
    left, _ = both()
    with left, plugged("right", call=slow_at("relu")):
        call_settled(compiled(f, "left", "right", measure_s=0.1), X)
    assert "composite" not in states()


def test_a_wrong_composite_is_out():
    def wrong(eager_call, region):
        def run(args):
            results = list(eager_call(args))
            results[0] = results[0] + 0.01
            return results

        return run

    left, right = both(otherwise=wrong)
    with left, right:
        fn = compiled(f, "left", "right", measure_s=0.1)
        torch.testing.assert_close(call_settled(fn, X), f(X))
    assert states()["composite"] == "failed"
    assert [trip.plugin for trip in all_trips()] == ["left"]


def test_a_backend_that_refuses_a_piece_leaves_it_to_others():
    def refuses(eager_call, region):
        raise fuseboard.LoweringError("only whole graphs")

    left, right = both(otherwise=refuses)
    with left, right:
        fn = compiled(f, "left", "right", measure_s=0.1)
        torch.testing.assert_close(call_settled(fn, X), f(X))
    assert states()["composite"] == "untried"
    assert all_trips() == []


def test_a_call_that_eager_refuses_is_the_users_error():
    def indexed(x, i):
        return f(x)[i]

    left, right = both()
    with left, right:
        fn = compiled(indexed, "left", "right", measure_s=0.1)
        with torch.no_grad():
            fn(X, torch.tensor([0]))
            with pytest.raises(IndexError):
                fn(X, torch.tensor([7]))
            torch.testing.assert_close(fn(X, torch.tensor([1])), f(X)[1:2])
    assert last_graph().settled


def test_before_the_first_answer_where_nothing_settles_later():
    left, right = both()
    with left, right:
        fn = compiled(f, "left", "right", measure_s=0.1, settle="first_call")
        with torch.no_grad():
            fn(X)
    assert states()["composite"] == "chosen"


def test_forward_and_backward_are_composed():
    def three(x):
        return (((x @ W).relu() @ W).tanh() @ W).sigmoid().sum(-1)

    x = X.clone().requires_grad_()
    reference = X.clone().requires_grad_()
    three(reference).sum().backward()
    left = plugged("left", call=slow_at("sigmoid", "sigmoid_backward"), info=QUICK)
    right = plugged("right", call=slow_at("relu", "threshold_backward"), info=QUICK)
    with left, right:
        fn = compiled(three, "left", "right", measure_s=0.1)
        fn(x).sum().backward()
        fuseboard.wait()
        x.grad = None
        fn(x).sum().backward()
    torch.testing.assert_close(x.grad, reference.grad)
    for kind in ("forward", "backward"):
        told = {c.name: c.state for c in last_graph(kind).candidates}
        assert told["composite"] == "chosen", kind


def test_pins_hold():
    left, right = both()
    with left, right:
        fn = compiled(f, "left", "right", measure_s=0.1, pin={"aten.relu": "right"})
        call_settled(fn, X)
    assert {n.backend for n in last_graph().nodes if "relu" in n.op} == {"right"}


def test_sizes_that_are_symbols_are_decided_within_the_call():
    left, right = both()
    with left, right:
        fn = compiled(f, "left", "right", measure_s=0.1, dynamic=True)
        torch.testing.assert_close(call_settled(fn, X), f(X))
    assert "composite" not in states()


def test_what_only_one_backend_takes_it_gets():
    with plugged("left", call=slow_at("tanh"), info=QUICK):
        right = plugged("right", claim=claim_ops("mm", "tanh"), call=slow_at("relu"), info=QUICK)
        with right:
            fn = compiled(f, "left", "right", "eager", measure_s=0.1)
            torch.testing.assert_close(call_settled(fn, X), f(X))
    assert last_graph().settled


# --- what an earlier process left -----------------------------------------------------------------


def again(**options):
    """As another process compiles it, with the same cost database."""
    torch._dynamo.reset()
    ledger.clear()
    return compiled(f, "left", "right", measure_s=0.1, **options)


def test_what_an_earlier_process_did_not_come_to_is_tried_by_a_later_one():
    left, right = both()
    with left, right:
        fn = again()
        with torch.no_grad():
            fn(X)  # the composite would be next
        assert not last_graph().settled
        torch.testing.assert_close(call_settled(again(on_failure="raise"), X), f(X))
    assert states()["composite"] == "chosen"
    assert all_trips() == []


def test_two_that_are_not_settled_settle():
    left, right = both()
    with left, right, torch.no_grad():
        one = again()
        one(X)
        other = again()
        other(X)
        assert fuseboard.wait()
        torch.testing.assert_close(one(X), f(X))
        torch.testing.assert_close(other(X), f(X))
    assert states()["composite"] == "chosen"


def test_what_had_nothing_to_gain_is_not_tried_again():
    measured = []
    slow = plugged("left", call=slow_at("mm", seconds=0.02), info=QUICK)
    with slow, plugged("right", call=slow_at("mm"), info=QUICK):
        call_settled(again(), X)
        with observing("onlooker", measure=lambda calls: measured.append(len(calls))):
            with torch.no_grad():
                again()(X)
    assert measured == []
    assert last_graph().decided == "taken from the cost database"
    assert last_graph().settled
    composite = last_graph().candidates[-1]
    assert (composite.name, composite.state) == ("composite", "untried")
    assert "less at best than with right alone" in composite.problem


def test_without_the_pieces_decisions_all_is_measured_again():
    left, right = both()
    with left, right:
        call_settled(again(), X)
        costs = database(resolve())
        costs.forget([found.key for found in costs.decisions() if found.level == "region"])
        torch.testing.assert_close(call_settled(again(), X), f(X))
    assert states() == {"left": "slower", "right": "slower", "composite": "chosen"}
    assert all_trips() == []


def test_one_wait_is_enough():
    """First for what takes long to compile, then for the composite."""
    left, right = both()
    with left, right, plugged("late", call=slow_at("mm")), torch.no_grad():
        fn = compiled(f, "left", "right", "late", measure_s=0.1)
        fn(X)
        assert fuseboard.wait()
    assert states()["composite"] == "chosen"


def test_ctrl_c_while_composing_leaves_the_winner_so_far():
    asked = []

    def measure(calls):
        asked.append(len(calls))
        if len(asked) == 2:  # the first piece
            raise KeyboardInterrupt

    left, right = both()
    with left, right, observing("user", measure=measure), torch.no_grad():
        fn = again()
        fn(X)
        with pytest.raises(KeyboardInterrupt):
            fn(X)
        torch.testing.assert_close(fn(X), f(X))
        assert fuseboard.wait()
    assert last_graph().settled
    assert "chosen" in (states()["left"], states()["right"])
