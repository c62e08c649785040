"""Lowered code that breaks its contract: eager's answer comes out, and eager runs from then on."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard.errors import RegionError
from fuseboard.report.data import ledger
from tests.support.backends import (
    all_trips,
    claim_ops,
    compiled,
    last_graph,
    pack_linears,
    plugged,
)
from tests.support.contained import boom, check, f, on_region, train
from tests.support.values import assert_same, rnd


def g(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.relu(x @ y)
    return a * 2, a.sum(1)


LIES = {
    "wrong_type": (lambda r, i: r[0], "returned Tensor, not a tuple or list"),
    "nothing": (lambda r, i: None, "returned NoneType"),
    "too_few": (lambda r, i: r[:1], "returned 1 outputs, expected 2"),
    "too_many": (lambda r, i: [*r, r[0]], "returned 3 outputs, expected 2"),
    "none_for_a_tensor": (lambda r, i: [r[0], None], "output 1 is NoneType, expected a tensor"),
    "number": (lambda r, i: [r[0], 3.0], "output 1 is float, expected a tensor"),
    "dtype": (lambda r, i: [r[0].double(), r[1]], "output 0 has dtype torch.float64, expected"),
    "shape": (lambda r, i: [r[0][:1], r[1]], "output 0 has shape (1, 6), expected (4, 6)"),
    "rank": (lambda r, i: [r[0], r[1][None]], "output 1 has shape (1, 4), expected (4,)"),
    "strides": (
        lambda r, i: [r[0].t().contiguous().t(), r[1]],
        "output 0 has strides (1, 4), expected (6, 1)",
    ),
    "expanded": (lambda r, i: [r[0], r[1][:1].expand(4)], "output 1 has strides (0,)"),
    "sparse": (lambda r, i: [r[0].to_sparse(), r[1]], "layout"),
    "meta": (lambda r, i: [r[0].to("meta"), r[1]], "output 0 is on meta, expected cpu"),
    "raises": (lambda r, i: boom(), "Boom: the engine exploded"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_region_that_breaks_its_contract(lie):
    """On the first call: eager's answer comes out, and eager runs from then on."""
    wrong, said = LIES[lie]
    x, y = rnd(4, 5), rnd(5, 6)
    with plugged("bad", call=on_region(wrong)):
        check(compiled(g, "bad"), x, y, reference=g)
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage, trip.instead) == ("bad", "run", "eager")
    assert said in trip.error


def test_a_region_that_breaks_its_contract_in_training():
    """Forward and backward are checked, each on its first call."""
    for lie in ("too_many", "raises"):
        torch._dynamo.reset()
        ledger.clear()
        with plugged("bad", call=on_region(LIES[lie][0])):
            fn = compiled(f, "bad")
            for _ in range(2):
                train(fn, f, rnd(3, 5))
        assert len(all_trips()) == 2
        assert {graph.kind for graph in ledger.graphs() if graph.trips} == {"forward", "backward"}


def test_verification_can_be_switched_off():
    """Then lies come through; nothing is checked, and nothing is replaced."""
    with plugged("bad", call=on_region(lambda r, i: [r[0].double(), r[1]])):
        fn = compiled(g, "bad", verify="off")
        with torch.no_grad():
            assert fn(rnd(4, 5), rnd(5, 6))[0].dtype == torch.float64
    assert not all_trips()


def test_a_region_that_fails_late():
    """It was right while it was judged: the call gives eager's answer all the same."""
    counts = [0]

    def fourth(results, inputs):
        counts[0] += 1
        return boom() if counts[0] == 4 else results

    with plugged("bad", call=on_region(fourth)):
        check(compiled(g, "bad"), rnd(4, 5), rnd(5, 6), calls=5, reference=g)
    (trip,) = all_trips()
    assert (trip.stage, trip.instead) == ("run", "eager")
    assert counts == [4]


def test_a_forward_that_fails_late():
    """The backward gets what eager's forward saves."""
    counts = [0]

    def call(eager_call, region):
        def run(args):
            counts[0] += region.kind == "forward"
            fails = region.kind == "forward" and counts[0] == 5
            return boom() if fails else eager_call(args)

        return run

    with plugged("bad", call=call):
        fn = compiled(f, "bad")
        for _ in range(4):
            train(fn, f, rnd(3, 5))
    (trip,) = all_trips()
    assert trip.region.startswith("forward")


def test_a_backward_that_fails_late():
    """Its saved tensors are gone: an error that names the plugin; eager from the next call on."""
    counts = [0]

    def call(eager_call, region):
        def run(args):
            counts[0] += region.kind == "backward"
            fails = region.kind == "backward" and counts[0] == 5
            return boom() if fails else eager_call(args)

        return run

    with plugged("bad", call=call):
        fn = compiled(f, "bad")
        for _ in range(2):
            train(fn, f, rnd(3, 5))
        with pytest.raises(RegionError, match=r"plugin 'bad' .* Boom: the engine exploded"):
            train(fn, f, rnd(3, 5))
        for _ in range(2):
            train(fn, f, rnd(3, 5))
    (trip,) = all_trips()
    assert "eager from the next one on" in trip.instead


def test_two_threads_that_meet_one_failure():
    """Both get eager's answer; it is told once."""
    ready = threading.Barrier(2, timeout=60)
    armed = threading.Event()

    def call(eager_call, region):
        def run(args):
            if armed.is_set():
                ready.wait()
                boom()
            return eager_call(args)

        return run

    problems = []

    def work():
        try:
            check(fn, rnd(4, 5), rnd(5, 6), calls=3, reference=g)
        except BaseException as error:
            problems.append(error)

    with plugged("bad", call=call):
        fn = compiled(g, "bad")
        check(fn, rnd(4, 5), rnd(5, 6), reference=g)
        armed.set()
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not problems
    assert len(all_trips()) == 1


def test_a_failure_in_one_of_several_regions():
    """The others stay where they are."""

    counts = [0, 0]

    def count(results, inputs):
        counts[0] += 1
        return results

    def fail(results, inputs):
        counts[1] += 1
        boom()

    with (
        plugged("good", claim=claim_ops("mm", "sum"), call=on_region(count)),
        plugged("bad", claim=claim_ops("relu"), call=on_region(fail)),
    ):
        fn = compiled(g, "good", "bad", stages={"plan": "tests.support.plans:first_claimer"})
        check(fn, rnd(4, 5), rnd(5, 6), calls=4, reference=g)
    (trip,) = all_trips()
    assert (trip.plugin, trip.source) == ("bad", f"{__file__}:{g.__code__.co_firstlineno + 1}")
    # Checked calls call each region thrice. In the first those after the bad one didn't run.
    assert counts == [3 + 6 + 2 * 2, 1]


def test_random_numbers_after_a_failure():
    """The first call starts eager anew with the generator as it was."""

    def h(x):
        return nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    def call(eager_call, region):
        def run(args):
            eager_call(args)
            boom()

        return run

    with plugged("bad", call=call):
        fn = compiled(h, "bad")
        for _ in range(3):
            torch.manual_seed(3)
            with torch.no_grad():
                got = fn(rnd(40))
            torch.manual_seed(3)
            assert_same(got, h(rnd(40)))
    assert len(all_trips()) == 1


# --- aliasing and writes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "number"),
    [
        (lambda r, i: [i[0], r[1]], 0),  # x + 0 taken for x
        (lambda r, i: [r[0], i[0].view(-1)[:20].view(4, 5)], 1),
        (lambda r, i: [r[0], r[0]], 1),  # equal values merged
        (lambda r, i: [r[0], r[0].view(4, 5)], 1),
    ],
    ids=["an_input", "a_view_of_an_input", "another_output", "a_view_of_another_output"],
)
def test_a_region_that_returns_an_alias(wrong, number):
    """It is cloned, from the first call on: what the caller does to one doesn't show in others."""

    def h(x):
        return x + 0, x * 1

    with plugged("bad", call=on_region(wrong)):
        fn = compiled(h, "bad")
        for _ in range(3):
            x = rnd(4, 5)
            with torch.no_grad():
                first, second = fn(x)
                assert_same((first, second), h(x))
                before = x.clone()
                (first, second)[number].add_(1)
                assert_same(x, before)
                assert_same((second, first)[number], before)
    assert f"outputs [{number}] are cloned" in last_graph().notes[-1]


def test_a_saved_tensor_that_is_an_alias():
    """The caller may write to an input after the forward; the gradient is of what was there."""

    def h(x, weight):
        return x.sort()[0] * weight

    def saves_input(eager_call, region):
        def run(args):
            inputs = list(args)
            results = list(eager_call(args))
            return [
                inputs[0] if r.dtype == inputs[0].dtype and torch.equal(r, inputs[0]) else r
                for r in results
            ]

        return run if region.kind == "forward" else eager_call

    def one_step(fn):
        x, weight = torch.arange(5.0), rnd(5).requires_grad_()
        y = fn(x, weight)
        x.zero_()
        y.sum().backward()
        return weight.grad

    with plugged("bad", call=saves_input):
        fn = compiled(h, "bad")
        for _ in range(3):
            assert_same(one_step(fn), one_step(h))


@pytest.mark.parametrize("kind", ["inference", "training"])
def test_a_region_that_writes_to_its_inputs(kind):
    """With ``verify="always"`` it is caught and undone."""

    def vandal(results, inputs):
        for value in inputs:
            if isinstance(value, torch.Tensor):
                value.fill_(-0.0)
        return results

    with plugged("bad", call=on_region(vandal)):
        fn = compiled(g if kind == "inference" else f, "bad", verify="always")
        x, y = rnd(4, 5), rnd(5, 6)
        before = x.clone(), y.clone()
        if kind == "inference":
            check(fn, x, y, reference=g)
        else:
            train(fn, f, x)
        assert_same((x, y), before)
    assert all("wrote to its inputs [0" in trip.error for trip in all_trips())
    assert len(all_trips()) == (1 if kind == "inference" else 2)


def test_a_region_that_writes_and_then_raises():
    """What it did is undone before eager is asked."""

    def vandal(results, inputs):
        inputs[0].zero_()
        boom()

    with plugged("bad", call=on_region(vandal)):
        x, y = rnd(4, 5), rnd(5, 6)
        check(compiled(g, "bad", verify="always"), x, y, reference=g)
        assert_same(x, rnd(4, 5))
    assert len(all_trips()) == 1


def test_a_region_that_writes_to_an_expanded_input():
    """One element in several places: undone too."""

    def vandal(results, inputs):
        inputs[0].as_strided((5,), (1,)).zero_()
        return results

    with plugged("bad", call=on_region(vandal)):
        x = rnd(1, 5).expand(4, 5)
        check(compiled(f, "bad", verify="always"), x)
        assert_same(x, rnd(1, 5).expand(4, 5))
    assert len(all_trips()) == 1


def test_inputs_of_every_kind_are_compared_bit_by_bit():
    """One element with a stride, a conjugate, NaN, signed zero, no element at all, bytes."""
    inputs = [
        rnd(3, 2, dtype=torch.bfloat16)[2:, 1].expand(1),
        rnd(6, dtype=torch.bfloat16)[1::7],
        torch.complex(rnd(3), rnd(3)).conj(),
        torch.tensor([float("nan"), -0.0, float("inf")]),
        rnd(0, 3),
        torch.tensor(3.0),
        torch.tensor([1, 2], dtype=torch.uint8),
        rnd(2, 3, 4).transpose(0, 2),
    ]

    def h(*args):
        return [arg * 2 for arg in args]

    with plugged("good"):
        check(compiled(h, "good", verify="always"), *inputs, reference=h)
    assert not all_trips()


def test_inputs_are_mutated_once():
    """A function that writes to its input and whose region fails writes just once."""

    def h(x, y):
        x.mul_(2).add_(y)
        y[0] = 1.0
        return x.sum()

    for lie in ("raises", "too_few", "dtype"):
        torch._dynamo.reset()
        with plugged("bad", call=on_region(LIES[lie][0])):
            fn = compiled(h, "bad")
            mine, theirs = [rnd(3), rnd(3, seed=1)], [rnd(3), rnd(3, seed=1)]
            for _ in range(3):
                assert_same(fn(*mine), h(*theirs))
                assert_same(mine, theirs)
    assert len(all_trips()) == 3


def test_a_prepare_graph_that_fails():
    """A rewrite whose packing works on fake tensors only: contained like its region."""

    def fuse(graph, region):
        fusions = pack_linears(graph, region)
        if fusions is None:
            return None

        def spoilt(apply):
            def run():
                apply()
                for node in graph.graph.find_nodes(
                    op="call_function", target=torch.ops.aten.clone.default
                ):
                    node.target = boom

            return run

        return [fuseboard.Fusion(f.name, f.nodes, spoilt(f.apply)) for f in fusions]

    model = nn.Linear(5, 6)
    with plugged("bad", fuse=fuse):
        check(compiled(model, "bad"), rnd(4, 5), reference=model)
    (trip,) = all_trips()
    assert (trip.plugin, trip.stage, trip.instead) == ("bad", "run", "eager")


def reusing(count, wrap=lambda buffer: buffer):
    """The right results, in the same few buffers again and again."""

    def call(eager_call, region):
        buffers = []

        def run(args):
            results = list(eager_call(args))
            if len(buffers) < count:
                buffers.append([wrap(torch.empty_like(one)) for one in results])
            buffers.append(buffers.pop(0))
            for buffer, result in zip(buffers[-1], results, strict=True):
                buffer.copy_(result)
            return [wrap(buffer) for buffer in buffers[-1]]

        return run

    return call


@pytest.mark.parametrize(
    "wrap",
    [
        lambda buffer: buffer,
        lambda buffer: buffer[:],
        lambda buffer: torch.from_numpy(buffer.numpy()),
    ],
    ids=["tensor", "view", "another engine's memory"],
)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("policy", ["priority", "measured"])
def test_a_region_that_returns_the_same_memory_again(wrap, count, policy, tmp_path):
    """The first result would be overwritten by a later call: eager's stays."""
    x, y = rnd(4, 3), rnd(3, 6)
    settings = {"policy": policy, "measure_s": 0.001, "cache_dir": str(tmp_path)}
    info = {"compiles_quickly": True}
    with plugged("reusing", call=reusing(count, wrap), info=info), torch.no_grad():
        fn = compiled(g, "reusing", **settings)
        results = [(fn(x * n, y), g(x * n, y)) for n in range(4)]
    for got, want in results:
        assert_same(got, want)
    (trip,) = all_trips()
    assert "memory that earlier results are in" in trip.error
