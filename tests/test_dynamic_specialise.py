"""``dynamic = "specialise"``: code for each combination of sizes, for who can't have symbols."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard.report.data import ledger
from tests.support.backends import all_trips, last_graph, op_name, pack_linears, plugged
from tests.support.contained import Boom
from tests.support.values import assert_same, rnd

ALTERNATE = {"stages": {"plan": "tests.support.plans:alternate"}}


@pytest.fixture(autouse=True)
def _clear_ledger():
    ledger.clear()


def specialised(fn, *backends, dynamic_sizes="specialise", **options):
    """Compiled with every size symbolic; ``static`` is specialised."""
    options = {"backends": list(backends or ("static",)), "dynamic": dynamic_sizes, **options}
    return torch.compile(fn, backend="fuseboard", dynamic=True, options=options)


def static(**hooks):
    return plugged("static", info={"dynamic_shapes": False}, **hooks)


def lowering(per_region):
    """A lower hook that first calls ``per_region(region)``."""

    def lower(region, inputs):
        per_region(region)
        return fuseboard.lower_eagerly(region)

    return lower


def f(x):
    return (x.exp() + 1) * x.shape[0]


def batch_of(region):
    """The first size of a static region's first input."""
    return region.graph.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]


def check(fn, reference, *batches):
    for n in batches:
        with torch.no_grad():
            assert_same(fn(rnd(n, 3)), reference(rnd(n, 3)))


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
        fn = specialised(g, stages={"plan": "tests.support.plans:first_claimer"})
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


# --- failures -------------------------------------------------------------------------------------


def fail_at(batch):
    def fail(region):
        if batch_of(region) == batch:
            raise Boom(f"not at {batch}")

    return lowering(fail)


def test_a_backend_that_fails_at_the_first_sizes():
    """The region goes to the next backend."""
    with static(lower=fail_at(4)), plugged("other"):
        check(specialised(f, "static", "other"), f, 4, 5)
    assert last_graph().regions[0].backend == "other"
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage) == ("static", "lower")


def test_a_backend_that_fails_at_other_sizes():
    """These run in eager, the others stay."""
    with static(lower=fail_at(5)):
        check(specialised(f), f, 4, 5, 6, 5)
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage) == ("static", "lower")
    assert trip.instead == "eager where x.size()[0] = 5, x.size()[1] = 3"
    (region,) = last_graph().regions
    assert region.backend == "static"
    assert [text.split(",")[0] for text in region.specialised] == [
        "x.size()[0] = 4",
        "x.size()[0] = 6",
    ]


def wrong_at(batch, wrong):
    def call(eager_call, region):
        return wrong if batch_of(region) == batch else eager_call

    return call


@pytest.mark.parametrize(
    "wrong",
    [
        lambda args: (torch.zeros(7),),
        lambda args: (),
        lambda args: (torch.zeros(3, 5).t(),),
        lambda args: 1 / 0,
    ],
    ids=["shape", "count", "strides", "raises"],
)
def test_wrong_results_at_other_sizes(wrong):
    """The first call with these sizes notices, and answers with eager's results."""
    with static(call=wrong_at(5, wrong)):
        check(specialised(f), f, 4, 5, 6, 5, 4)
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage) == ("static", "run")
    assert trip.instead == "eager where x.size()[0] = 5, x.size()[1] = 3"


def test_raising_is_the_policy():
    """The first call with sizes that fail raises, and so does the next."""
    with static(lower=fail_at(5)):
        fn = specialised(f, on_failure="raise")
        check(fn, f, 4)
        for _ in range(2):
            with pytest.raises(fuseboard.RegionError, match="not at 5"), torch.no_grad():
                fn(rnd(5, 3))
        check(fn, f, 4, 6)


def test_the_users_own_error():
    """An index out of range is eager's exception, and nobody trips."""

    def g(x, i):
        return x[i] + 1

    with static():
        fn = specialised(g)
        with torch.no_grad():
            fn(rnd(4, 3), torch.tensor([0, 1]))
            for n in (5, 4):
                with pytest.raises(IndexError, match="out of bounds"):
                    fn(rnd(n, 3), torch.tensor([0, 7]))
            assert_same(fn(rnd(5, 3), torch.tensor([0, 4])), rnd(5, 3)[[0, 4]] + 1)
    assert not all_trips()


def test_an_interrupt_leaves_no_half_made_entry():
    """The next call with these sizes compiles them."""
    tries = []

    def interrupt(region):
        if batch_of(region) == 5:
            tries.append(1)
            if len(tries) == 1:
                raise KeyboardInterrupt

    with static(lower=lowering(interrupt)):
        fn = specialised(f)
        check(fn, f, 4)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            fn(rnd(5, 3))
        check(fn, f, 5, 4, 5)
    assert len(tries) == 2
    assert len(last_graph().regions[0].specialised) == 2


def test_threads():
    """Each combination is compiled once, however many ask for it at a time."""
    lowered, wrong = [], []

    def slow(region):
        lowered.append(batch_of(region))

    with static(lower=lowering(slow)):
        fn = specialised(f, max_shapes=4)
        check(fn, f, 4)
        barrier = threading.Barrier(4)

        def work():
            barrier.wait()
            for n in (5, 6, 7, 8, 9) * 3:
                with torch.no_grad():
                    if not torch.equal(fn(rnd(n, 3)), f(rnd(n, 3))):
                        wrong.append(n)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(lowered) == len(set(lowered)) == 4
    assert not all_trips()


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


def test_draws_of_a_call_that_failed_are_drawn_again():
    """The seed's numbers, though the first try had drawn some."""

    def g(x):
        return x + torch.rand_like(x)

    def call(eager_call, region):
        def run(args):
            eager_call(args)
            raise Boom("after drawing")

        return run if batch_of(region) == 5 else eager_call

    with static(call=call), torch.no_grad():
        fn = specialised(g)
        for n in (4, 5, 6):
            torch.manual_seed(n)
            got = fn(rnd(n, 3))
            torch.manual_seed(n)
            assert_same(got, g(rnd(n, 3)))
    assert len(all_trips()) == 1
