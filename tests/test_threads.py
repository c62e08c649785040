"""Two threads that compile at once, six that call; and settings, which belong to a compile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard.report.data import ledger
from tests.support.backends import all_trips, compiled, graph_count, last_graph, plugged
from tests.support.values import assert_same, rnd


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work(0)`` to ``work(count - 1)`` at once; the first exception comes out."""
    problems: list[BaseException] = []
    ready = threading.Barrier(count, timeout=60)

    def run(number: int) -> None:
        try:
            ready.wait()
            work(number)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def step(fn, x):
    x = x.clone().requires_grad_()
    fn(x).square().sum().backward()
    return x.grad


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_two_threads_compile_at_once(grad):
    """Other functions, and the same one."""

    def first(x):
        return (x.exp() * 2).softmax(-1)

    def second(x):
        return nn.functional.layer_norm(x.sin(), (7,))

    for functions in ((first, second), (first, first)):
        torch._dynamo.reset()
        compiled_functions = [compiled(f) for f in functions]

        def work(number, functions=functions, compiled_functions=compiled_functions):
            for seed in range(3):
                x = rnd(5, 7, seed=seed)
                pair = compiled_functions[number], functions[number]
                if grad:
                    assert_same(*(step(fn, x) for fn in pair))
                else:
                    with torch.no_grad():
                        assert_same(*(fn(x) for fn in pair))

        in_threads(2, work)
    assert not all_trips()


def test_six_threads_call():
    """A model with prepared weights, dropout excluded: each thread gets its own answers."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(rnd(8, 2100))

        def forward(self, x):
            return (x @ self.weight.softmax(-1)).sin()

    model = Wide()
    fn = compiled(model)

    def work(number):
        with torch.no_grad():
            for i in range(30):
                x = rnd(3, 8, seed=100 * number + i)
                assert_same(fn(x), model(x))

    in_threads(6, work)
    assert last_graph().regions[0].hoisted == 1
    assert not all_trips()


def test_six_threads_train():
    """Backwards run on autograd's threads as well as on these."""
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))
    fn = compiled(model)

    def work(number):
        for i in range(5):
            x = rnd(4, 6, seed=10 * number + i)
            results = []
            for function in (fn, model):
                own = x.clone().requires_grad_()
                y = function(own)
                (gradient,) = torch.autograd.grad(y.square().sum(), own)
                results.append((y, gradient))
            assert_same(*results)

    in_threads(6, work)
    assert not all_trips()


# --- settings are a snapshot ---------------------------------------------------------------------


def f(x):
    return x.sigmoid().sum(0) * 2


def test_others_go_on_while_a_backward_is_compiled():
    """Compiled functions are called during its traces, and others compiled, as if nothing was."""
    tracing, called = threading.Event(), threading.Event()

    def tanh_backward(grad, result):
        if not tracing.is_set():
            tracing.set()
            called.wait(30)
            time.sleep(0.3)  # the other thread is in Dynamo, or waits for it
        return grad * (1 - result * result)

    def decompositions(kind):
        return {torch.ops.aten.tanh_backward.default: tanh_backward} if kind == "backward" else {}

    def tanh(x):
        return x.tanh() * 2

    x = rnd(5, 7)
    layers = nn.Sequential(nn.Linear(7, 7), nn.ReLU())
    known, other = compiled(lambda t: t.sin() + 1), compiled(layers)
    known(x)
    found = {}

    def work(number):
        if number == 0:
            found["trained"] = step(trained, x)
            return
        assert tracing.wait(30)
        try:
            found["known"] = known(x)
        finally:
            called.set()
        found["other"] = other(x)

    with plugged(decompositions=decompositions):
        trained = compiled(tanh, "fake")
        in_threads(2, work)
        assert tracing.is_set()
    expected = {"trained": step(tanh, x), "known": x.sin() + 1, "other": layers(x)}
    torch.testing.assert_close(found, expected)
    assert not all_trips()


def test_settings_around_the_compile_hold_for_the_backward():
    """It is compiled later, outside of the block."""
    with plugged("other"):
        fn = torch.compile(f, backend="fuseboard")
        x = rnd(3, 4).requires_grad_()
        with fuseboard.settings(backends=["other"]):
            y = fn(x)
        y.sum().backward()
    for kind in ("forward", "backward"):
        assert {region.backend for region in last_graph(kind).regions} == {"other"}


def test_settings_entered_afterwards_change_nothing():
    """Compiled code keeps the settings that it was compiled under."""
    with plugged("other"):
        with fuseboard.settings(backends=["eager"]):
            fn = torch.compile(f, backend="fuseboard")
            fn(rnd(3, 4).requires_grad_())
        count = graph_count("forward")
        with fuseboard.settings(backends=["other"], verify="always", on_failure="raise"):
            y = fn(rnd(3, 4).requires_grad_())
            y.sum().backward()
    assert graph_count("forward") == count == 1
    assert {region.backend for region in last_graph("backward").regions} == {"eager"}


def test_settings_of_a_thread_are_its_own():
    """A context in one thread doesn't reach another one."""
    with plugged("other"):

        def work(number):
            name = ("other", "eager")[number]
            with fuseboard.settings(backends=[name]):
                function = [lambda x: x.exp() + 1, lambda x: x.sin() + 2][number]
                fn = torch.compile(function, backend="fuseboard")
                with torch.no_grad():
                    assert_same(fn(rnd(3)), function(rnd(3)))

        in_threads(2, work)
    chosen = {
        op: region.backend for g in ledger.graphs() for region in g.regions for op in region.ops
    }
    assert chosen["aten.exp.default"] == "other"
    assert chosen["aten.sin.default"] == "eager"


def test_options_win_over_the_context():
    """What ``torch.compile`` was given is nearest."""
    with plugged("other"), fuseboard.settings(backends=["other"]):
        compiled(f, "eager")(rnd(3, 4))
    assert {region.backend for region in last_graph().regions} == {"eager"}


def test_a_plugin_that_is_taken_off_goes_on_serving():
    """What was compiled with it works, its backward too, which is compiled later."""
    with plugged("other"):
        fn = compiled(f, "other")
        x = rnd(3, 4).requires_grad_()
        y = fn(x)
    y.sum().backward()
    assert {region.backend for region in last_graph("backward").regions} == {"other"}
    own = rnd(3, 4).requires_grad_()
    f(own).sum().backward()
    assert_same(x.grad, own.grad)
