"""Guards on sizes that plugins add: told of, and undone where they would defeat symbolic sizes."""

from __future__ import annotations

import pytest
import torch

import fuseboard
from fuseboard.lower.guards import keeping_sizes
from fuseboard.pipeline import rewriting
from fuseboard.report.data import ledger
from fuseboard.torch_api.dynamo_graphs import note_values
from tests.support.backends import all_trips, claim_all, compiled, graph_count, last_graph, plugged
from tests.support.values import assert_same, rnd


def f(x):
    return x.exp() + x.shape[0]


def check(fn, reference, *batches):
    """Eager's answers for batches of these sizes, in this order."""
    for n in batches:
        with torch.no_grad():
            assert_same(fn(rnd(n, 3)), reference(rnd(n, 3)))


def lowering(look):
    """A lower hook that first looks at the first input's batch, a SymInt."""

    def lower(region, inputs):
        look(next(value for value in inputs if isinstance(value, torch.Tensor)).shape[0])
        return fuseboard.lower_eagerly(region)

    return lower


def test_a_backend_that_fixes_a_size():
    """It is declined with that reason, what it learned is forgotten, and nothing is recompiled."""
    with plugged("fixing", lower=lowering(int)):
        check(compiled(f, "fixing", dynamic=True), f, 4, 5, 6, 7)
    assert graph_count("inference") == 1
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage, trip.instead) == ("fixing", "lower", "eager")
    assert "it fixes x.size()[0] to 4: every other size would be compiled again" in trip.error


def test_a_size_that_is_fixed_again():
    """Each backend that fixes it is caught: the first one's answers were in no cache."""
    with plugged("one", lower=lowering(int)), plugged("two", lower=lowering(int)):
        check(compiled(f, "one", "two", dynamic=True), f, 4, 5, 6)
    assert graph_count("inference") == 1
    assert [trip.plugin for trip in all_trips()] == ["one", "two"]
    assert all("it fixes x.size()[0] to 4" in trip.error for trip in all_trips())


def test_a_backend_that_says_that_it_fixes_sizes():
    """As plain compilers may: one graph a size, and the report says why."""
    with plugged("fixing", lower=lowering(int), info={"fixes_sizes": True}):
        check(compiled(f, "fixing", dynamic=True), f, 4, 5)
    assert graph_count("inference") == 2
    assert not all_trips()
    (note,) = ledger.graphs()[0].regions[0].notes
    assert note == "fixing added guards on sizes: Eq(x.size()[0], 4)"


@pytest.mark.usefixtures("policy_measured")
@pytest.mark.parametrize("says_so", [True, False])
def test_where_no_size_may_be_fixed_a_backend_that_says_that_it_does_is_not_tried(says_so):
    """As beside the calls. One that doesn't say so has failed."""
    info = {"fixes_sizes": says_so, "compiles_quickly": True}
    with plugged("fixing", lower=lowering(int), info=info), keeping_sizes():
        options = {"settle": "first_call", "measure_s": 0.01}
        check(compiled(f, "fixing", "eager", dynamic=True, **options), f, 4, 5, 6)
    assert [trip.plugin for trip in all_trips()] == ([] if says_so else ["fixing"])
    (row,) = [row for row in ledger.graphs()[0].candidates if row.name.startswith("fixing")]
    assert row.state == ("untried" if says_so else "failed")
    assert "it fixes x.size()[0] to 4" in row.problem


def test_mark_dynamic_comes_first():
    """What the user wants dynamic isn't fixed, whatever the backend says of itself."""
    with plugged("fixing", lower=lowering(int), info={"fixes_sizes": True}):
        fn = compiled(f, "fixing")
        x = rnd(4, 3)
        torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            assert_same(fn(x), f(x))
        check(fn, f, 5, 6)
    assert graph_count("inference") == 1
    (trip,) = all_trips()
    assert "which mark_dynamic wants to be dynamic" in trip.error


def test_guards_are_told_of():
    """Code for sizes up to a bound is kept, its guard too: other sizes get another graph."""
    with plugged("bounded", lower=lowering(lambda n: bool(n < 6))):
        check(compiled(f, "bounded", dynamic=True), f, 4, 5, 7, 8)
    assert graph_count("inference") == 2
    first, second = (graph.regions[0] for graph in ledger.graphs())
    assert first.notes == ["bounded added guards on sizes: x.size()[0] < 6"]
    assert second.notes == ["bounded added guards on sizes: x.size()[0] >= 6"]
    assert not all_trips()


def test_guards_of_a_backend_that_fails():
    """They go with its code: the sizes that it wouldn't have taken need no other graph."""

    def fail(n):
        if n < 6:
            raise fuseboard.LoweringError("not that small")

    with plugged("failing", lower=lowering(fail)):
        check(compiled(f, "failing", dynamic=True), f, 4, 5, 7, 8)
    assert graph_count("inference") == 1
    assert len(all_trips()) == 1


def test_guards_of_claims():
    """A claim that depends on a size is told of; one that fixes a size trips."""

    def bounded(graph):
        value = graph.graph.find_nodes(op="placeholder")[-1].meta["val"]
        return claim_all(graph) if value.shape[0] < 6 else []

    def fixing(graph):
        value = graph.graph.find_nodes(op="placeholder")[-1].meta["val"]
        return claim_all(graph) if int(value.shape[0]) else []

    with plugged("bounded", claim=bounded), plugged("fixing", claim=fixing):
        fn = compiled(f, "fixing", "bounded", dynamic=True)
        check(fn, f, 4, 5)
    assert graph_count("inference") == 1
    assert "bounded added guards on sizes: x.size()[0] < 6" in last_graph().notes
    assert [(trip.plugin, trip.stage) for trip in all_trips()] == [("fixing", "claim")]


def test_a_call_without_a_value_in_dynamos_graph():
    """What fake values are made anew fixes no size: real tensors and symbols don't meet."""

    def logged(x):
        torch._C._log_api_usage_once("fuseboard.tests")
        return x.unsqueeze(0).expand(2, x.shape[0], 3) + 1

    check(compiled(logged, "eager", dynamic=True), logged, 4, 5, 6)
    assert graph_count("inference") == 1


def test_values_that_are_made_anew_have_dynamos_symbols(monkeypatch):
    """Where Dynamo's value of one node is missing, all are made of its values of the inputs."""

    def forget(graph, inputs):
        next(iter(graph.graph.find_nodes(op="call_method"))).meta.pop("example_value")
        note_values(graph, inputs)

    monkeypatch.setattr(rewriting, "note_values", forget)

    def expanded(x):
        return x.unsqueeze(0).expand(2, x.shape[0], 3) + 1

    check(compiled(expanded, "eager", dynamic=True), expanded, 4, 5, 6)
    assert graph_count("inference") == 1
