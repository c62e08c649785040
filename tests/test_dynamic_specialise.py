"""``dynamic = "specialise"``: code for each combination of sizes, for who can't have symbols."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard.report.data import ledger
from tests.support.backends import all_trips, claim_ops, last_graph, op_name, pack_linears, plugged
from tests.support.specialising import batch_of, check, f, lowering, specialised, static
from tests.support.values import assert_same, rnd

ALTERNATE = {"stages": {"plan": "tests.support.plans:alternate"}}
FIRST = {"plan": "tests.support.plans:first_claimer"}


def test_each_combination_is_compiled_once():
    """And the report says which."""
    lowered = []
    with static(lower=lowering(lambda region: lowered.append(batch_of(region)))):
        check(specialised(f), f, 4, 5, 4, 6, 5, 6)
    assert lowered == [4, 5, 6]
    (region,) = last_graph().regions
    assert (region.backend, len(ledger.graphs())) == ("static", 1)
    assert region.specialised == [
        "x.size()[0] = 4, x.size()[1] = 3",
        "x.size()[0] = 5, x.size()[1] = 3",
        "x.size()[0] = 6, x.size()[1] = 3",
    ]
    assert "compiled for 3 combinations of sizes" in str(fuseboard.last_report())


def test_a_backend_sees_plain_sizes_only():
    """In claims and in regions: no symbols, no arithmetic on sizes, no inputs that are numbers."""
    seen = []

    def look(graph):
        for node in graph.graph.nodes:
            if node.op in ("placeholder", "call_function"):
                value = node.meta["val"]
                assert isinstance(value, torch.Tensor)
                seen.append(op_name(node))
                numbers = (*value.shape, *value.stride(), value.storage_offset())
                assert all(type(number) is int for number in numbers)

    def claim(graph):
        look(graph)
        return fuseboard.claim_nodes(graph, lambda node: None)

    def g(x, y):
        n = x.shape[0]
        return x.view(n * 2, -1) + y[: n // 2].sum() / n, torch.arange(n) * n, x.t() @ x

    with static(claim=claim, lower=lowering(lambda region: look(region.graph))):
        fn = specialised(g, on_failure="raise")
        for n in (4, 6, 10):
            with torch.no_grad():
                assert_same(fn(rnd(n, 4), rnd(n)), g(rnd(n, 4), rnd(n)))
    assert {"view", "arange", "mm"} <= set(seen)
    assert not {"floordiv", "sym_size"} & set(seen)


def test_no_further_than_max_shapes():
    """What comes after runs in eager; that is said once."""
    lowered = []
    with static(lower=lowering(lambda region: lowered.append(batch_of(region)))):
        check(specialised(f, max_shapes=2), f, 4, 5, 6, 7, 6, 4, 5)
    assert lowered == [4, 5]
    (region,) = last_graph().regions
    assert [note for note in region.notes if "max_shapes = 2" in note] == region.notes
    assert not all_trips()


def test_a_call_is_one_lookup():
    """The generated code of a size that is known, and has been checked: key, table, call."""
    with static():
        fn = specialised(f)
        calls = []
        original = fuseboard.lower.specialise.Specialised._missing
        fuseboard.lower.specialise.Specialised._missing = lambda self, args: (
            calls.append(1) or original(self, args)
        )
        try:
            check(fn, f, 4, 5, 4, 5, 5)
        finally:
            fuseboard.lower.specialise.Specialised._missing = original
    assert len(calls) == 1  # 5, once; 4 was compiled with the graph


@pytest.mark.parametrize("many", [False, True], ids=["one_region", "many_regions"])
def test_training(many):
    """Forward and backward are specialised, each for its own sizes."""
    model = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.GELU(), nn.Linear(10, 3))
    with static(), plugged("other"):
        names = ("static", "other") if many else ("static",)
        fn = specialised(model, *names, on_failure="raise", **(ALTERNATE if many else {}))
        for batch in (4, 5, 9, 4):
            results = []
            for function in (fn, model):
                model.zero_grad()
                x = rnd(batch, 6).requires_grad_()
                y = function(x)
                y.square().sum().backward()
                results.append([y, x.grad, *(p.grad.clone() for p in model.parameters())])
            torch.testing.assert_close(*results)
    assert any(len(region.specialised) == 3 for region in last_graph("forward").regions)
    assert any(len(region.specialised) == 3 for region in last_graph("backward").regions)


def test_sizes_that_data_decide_are_declined():
    """With the reason; what depends on the inputs' sizes is specialised all the same."""

    def g(x):
        return x.exp() + 1, x[x > 0] * 2

    with static(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fn = specialised(g, stages=FIRST)
        for n in (4, 5):
            with torch.no_grad():
                assert_same(fn(rnd(n, 3)), g(rnd(n, 3)))
    homes = {node.op: node for node in last_graph().nodes}
    assert homes["aten.exp.default"].backend == "static"
    assert homes["aten.mul.Tensor"].backend == "eager"
    assert "sizes that only the data decide" in homes["aten.mul.Tensor"].declined["static"]


def test_declined_without_the_setting():
    """``dynamic = "decline"``, the default, gives such a backend nothing symbolic."""
    with static():
        check(specialised(f, dynamic_sizes="decline"), f, 4, 5)
    node = last_graph().nodes[-1]
    assert node.backend == "eager"
    assert node.declined["static"] == "symbolic sizes; static has no dynamic shapes"


# --- on the backend's usual way -------------------------------------------------------------------


def test_packed_weights():
    """Hoisted for each combination, and made again when a weight changes."""
    model = nn.Linear(6, 3)
    with static(fuse=pack_linears), torch.no_grad():
        fn = specialised(model, on_failure="raise")
        for n in (4, 5, 4, 5):
            torch.testing.assert_close(fn(rnd(n, 6)), model(rnd(n, 6)))
            model.weight.mul_(2)
    (region,) = last_graph().regions
    assert (region.hoisted, len(region.specialised)) == (1, 2)
    assert [fusion.number for fusion in region.fusions] == [0]


def test_a_fusion_is_switched_off_at_every_size():
    """Fusions count as in the first specialisation."""
    seen = []

    def look(region):
        seen.append(any(op_name(n) == "clone" for n in region.graph.graph.nodes))

    with static(fuse=pack_linears, lower=lowering(look)), torch.no_grad():
        fn = specialised(nn.Linear(6, 3), fuse_skip=[0], hoist=False)
        for n in (4, 5, 6):
            fn(rnd(n, 6))
    assert seen == [False, False, False]


def test_isomorphic_regions():
    """What the backend makes for one place and size serves the other place, too."""
    lowered = []
    ops = {"static": claim_ops("exp"), "other": claim_ops("sin")}
    look = lowering(lambda region: lowered.append(batch_of(region)))

    def g(x):
        return x.exp().sin().exp().sin()

    with static(claim=ops["static"], lower=look), plugged("other", claim=ops["other"]):
        fn = specialised(g, "static", "other", stages=FIRST)
        check(fn, g, 4, 5, 6)
    assert lowered == [4, 5, 6]
    own = [region for region in last_graph().regions if region.backend == "static"]
    assert [len(region.specialised) for region in own] == [3, 3]
    assert own[1].same_as == own[0].name


def test_decompositions():
    """The backend's own table, at each size."""
    aten = torch.ops.aten
    seen = []

    def table(kind):
        return torch._decomp.get_decompositions([aten.gelu])

    def look(region):
        seen.append({op_name(node) for node in region.graph.graph.nodes})

    with static(decompositions=table, lower=lowering(look)), plugged("other"):
        fn = specialised(lambda x: nn.functional.gelu(x), "static")
        with torch.no_grad():
            for n in (4, 5):
                x = rnd(n, 3)
                torch.testing.assert_close(fn(x), nn.functional.gelu(x))
    assert len(seen) == 2
    assert all("gelu" not in names and "erf" in names for names in seen)


def test_the_callers_modes_stay_outside():
    """A size first met under inference mode, autocast or a seed compiles as any other."""
    with static(lower=lowering(lambda region: torch.rand(3))):
        fn = specialised(f, on_failure="raise")
        check(fn, f, 4)
        with torch.inference_mode():
            assert_same(fn(rnd(5, 3)), f(rnd(5, 3)))
        check(fn, f, 5)
        torch.manual_seed(0)
        check(fn, f, 6)
        drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))
    assert not all_trips()
