"""Regions whose outputs change their form after the first calls: eager's answer, and a trip."""

from __future__ import annotations

import pytest
import torch

from fuseboard.errors import RegionError
from fuseboard.report.data import ledger
from fuseboard.run.outputs import EVERY
from tests.support.backends import all_trips, claim_ops, compiled, last_graph, plugged
from tests.support.contained import on_region
from tests.support.eager_loses import MEASURE
from tests.support.values import assert_same, rnd

#: What a call gives instead of two right results, and what is said of it.
CHANGES = {
    "dtype": (lambda r: [r[0].double(), r[1]], "output 0 has dtype torch.float64"),
    "shape": (lambda r: [r[0][:1], r[1]], "output 0 has shape (1, 6)"),
    "rank": (lambda r: [r[0], r[1][None]], "output 1 has shape (1, 4)"),
    "strides": (lambda r: [r[0].t().contiguous().t(), r[1]], "output 0 has strides (1, 4)"),
    "none": (lambda r: [r[0], None], "'NoneType' object"),
    "number": (lambda r: [r[0], 3.0], "'float' object"),
    "sparse": (lambda r: [r[0].to_sparse(), r[1]], "output 0"),
    "too few": (lambda r: r[:1], "values to unpack"),
    "too many": (lambda r: [*r, r[0]], "values to unpack"),
}


def g(x, y):
    a = torch.relu(x @ y)
    return a * 2, a.sum(1)


def later(change, calls=3):
    """The right results at first, changed ones after so many calls."""
    count = iter(range(1000))
    return on_region(lambda results, inputs: change(results) if next(count) >= calls else results)


@pytest.mark.parametrize("name", CHANGES)
def test_outputs_of_another_form_in_a_later_call_are_noticed(name):
    """Eager answers that call, one of the first, and all after it."""
    change, said = CHANGES[name]
    x, y = rnd(4, 3), rnd(3, 6)
    with plugged("changing", call=later(change)), torch.no_grad():
        fn = compiled(g, "changing", policy="priority")
        for _ in range(6):
            assert_same(fn(x, y), g(x, y))
    (trip,) = all_trips()
    assert trip.plugin == "changing"
    assert said in trip.error
    assert {region.backend for region in last_graph().regions} <= {"eager"}


@pytest.mark.parametrize("policy", ["priority", "measured"])
def test_later_on_one_call_of_several_looks(policy, tmp_path):
    """A look costs what small graphs would feel; what goes on being wrong is noticed soon."""
    settings = {"policy": policy, "measure_s": 0.001, "cache_dir": str(tmp_path)}
    x, y = rnd(4, 3), rnd(3, 6)
    call = later(CHANGES["dtype"][0], calls=300)
    with plugged("changing", call=call, info={"compiles_quickly": True}), torch.no_grad():
        fn = compiled(g, "changing", **settings)
        results = [fn(x, y)[0].dtype for _ in range(400)]
    assert results.count(torch.float64) < EVERY
    assert results[-1] == torch.float32
    assert [trip.plugin for trip in all_trips()] == ["changing"]


def test_one_of_several_regions_is_noticed_before_another_gets_it():
    """What is handed on is looked at as what the caller gets is."""
    info = {"compiles_quickly": True}

    def f(x):
        return torch.relu(x).cos() + 1

    call = later(lambda results: [results[0].double()])
    with plugged("changing", call=call, claim=claim_ops("relu"), info=info), torch.no_grad():
        fn = compiled(f, "changing", "eager", policy="priority", min_region_us=0)
        for _ in range(6):
            assert_same(fn(rnd(4, 3)), f(rnd(4, 3)))
    assert [trip.plugin for trip in all_trips()] == ["changing"]


def test_sizes_that_are_symbolic_may_change():
    """With the outputs' strides; those that are fixed may not."""
    info = {"compiles_quickly": True}
    with plugged("honest", info=info), torch.no_grad():
        fn = compiled(g, "honest", dynamic=True, policy="priority")
        for n in (4, 5, 1, 0, 7, 4):
            assert_same(fn(rnd(n, 3), rnd(3, 6)), g(rnd(n, 3), rnd(3, 6)))
    assert not all_trips()


def test_nothing_is_looked_at_where_nothing_is_verified():
    """``verify = "off"`` means that."""
    with plugged("changing", call=later(lambda r: [r[0].double(), r[1]])), torch.no_grad():
        fn = compiled(g, "changing", policy="priority", verify="off")
        results = [fn(rnd(4, 3), rnd(3, 6))[0].dtype for _ in range(5)]
    assert results[-1] == torch.float64
    assert not all_trips()


def test_a_backward_s_outputs_are_looked_at():
    """The failing call raises, since its saved tensors are gone; later ones are eager's."""

    def call(eager_call, region):
        if region.kind != "backward":
            return eager_call
        return later(lambda results: [r.double() for r in results])(eager_call, region)

    def f(x):
        return (x.exp() * 2).sum()

    with plugged("changing", call=call, info={"compiles_quickly": True}):
        fn = compiled(f, "changing", policy="priority")
        raised = 0
        for _ in range(6):
            x = rnd(4).requires_grad_()
            try:
                (grad,) = torch.autograd.grad(fn(x), x)
            except RegionError:
                raised += 1
                continue
            torch.testing.assert_close(grad, 2 * rnd(4).exp())
    assert raised == 1
    assert [trip.plugin for trip in all_trips()] == ["changing"]


def test_what_tripped_in_a_later_call_isn_t_chosen_by_later_processes(tmp_path):
    """Though it would be right in the first calls again. The next best is, and eager in the end."""
    settings = {"policy": "measured", "measure_s": 0.001, "cache_dir": str(tmp_path)}
    settings["stages"] = {"measure": MEASURE}
    x, y = rnd(4, 3), rnd(3, 6)
    trips = []
    for _ in range(4):
        torch._dynamo.reset()
        ledger.clear()
        one, two = (later(CHANGES["dtype"][0], calls=20) for _ in range(2))
        info = {"compiles_quickly": True}
        with plugged("one", call=one, info=info), plugged("two", call=two, info=info):
            fn = compiled(g, "one", "two", **settings)
            with torch.no_grad():
                for _ in range(60):
                    got = fn(x, y)
            assert_same(got, g(x, y))
        trips.append([trip.plugin for trip in all_trips()])
    assert sorted(trips) == [[], [], ["one"], ["two"]]
    assert trips[2:] == [[], []]
    assert last_graph().settled
    rows = {row.name: row for row in last_graph().candidates}
    assert {rows[name].state for name in ("one", "two")} == {"failed"}
    assert "dtype" in rows["one"].problem
