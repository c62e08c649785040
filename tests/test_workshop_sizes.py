"""Graphs with symbolic sizes, compiled beside their calls."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import fuseboard
from fuseboard.report.data import ledger
from fuseboard.workshop import process
from fuseboard.workshop.by_sizes import BySizes
from fuseboard.workshop.sizes import SizeCondition, SizeRoute
from fuseboard.workshop.states import GraphState
from tests.support.beside import compare_all, life, lives, mlp, pinned, wait_for

pytestmark = pytest.mark.usefixtures("as_users_run_it", "chosen")


class Block(nn.Module):
    """A transformer's."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        values = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(values.transpose(1, 2).reshape(batch, length, width))


def images():
    norm = nn.BatchNorm2d(4).eval()
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm, nn.ReLU(), nn.AvgPool2d(2))


def settle(run, *calls):
    """Call with these inputs, of which the second ones bring symbolic sizes; then wait."""
    for inputs in calls:
        run(*inputs)
    assert fuseboard.wait(200)


def check(run, model, inputs, times=2):
    """Values are eager's before sizes are known to be right, and after that."""
    for _ in range(times):
        torch.testing.assert_close(run(*inputs), model(*inputs))
        compare_all()


def made_again():
    """The reports of graphs that were made again in this process; the first one may have been
    compiled for the first sizes alone."""
    return [graph for graph in ledger.graphs() if "load" in graph.seconds]


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
@pytest.mark.parametrize(
    ("make", "inputs", "sizes"),
    [
        (Block, lambda n: torch.randn(2, n, 16), (5, 6, 40, 3, 1)),
        (mlp, lambda n: torch.randn(n, 64), (5, 6, 40, 1, 0)),
        (images, lambda n: torch.randn(2, 3, n, n + 2), (8, 10, 33, 5, 2)),
    ],
    ids=["block", "mlp", "images"],
)
def test_values_of_all_sizes_are_eagers_and_nothing_is_traced(traced, make, inputs, sizes, dynamic):
    """Sizes that were compiled for, others, and those for which Dynamo compiles again."""
    model = make()
    with torch.no_grad():
        run = pinned(model, "inductor", dynamic)
        settle(run, *([inputs(n)] for n in sizes[:2]))
        for n in sizes:
            check(run, model, [inputs(n)])
    assert traced == []
    backends = [graph.regions[0].backend for graph in made_again() if graph.regions]
    assert backends.count("inductor") >= (1 if dynamic else 2)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [lambda: nn.Sequential(mlp(16), nn.GELU()), Block])
def test_training_with_sizes_that_vary(traced, make):
    """Outputs and gradients, of the weights and of the input."""
    model = make()
    run = pinned(model, "inductor")
    shape = (16,) if isinstance(model, nn.Sequential) else (3, 16)

    def step(called, x):
        out = called(x)
        return out, torch.autograd.grad(out.square().mean(), [x, *model.parameters()])

    for n in (4, 6, 6, 17, 17, 5):
        x = torch.randn(n, *shape, requires_grad=True)
        torch.testing.assert_close(step(run, x), step(model, x))
        assert fuseboard.wait(200)
        compare_all()
    assert traced == []
    assert [graph.kind for graph in made_again()].count("backward") >= 2


COUNTING = """
    code = fuseboard.lower_eagerly(region)
    rows = next(value for value in inputs if hasattr(value, "dim")).shape[0]
    {guard}
    def call(args):
        calls.append(1)
        return code.call(args)
    return fuseboard.LoweredRegion(call)

calls = []
"""


def f(x):
    return x.exp() + x.shape[0]


@pytest.mark.thorough
def test_guards_of_a_backend_are_the_programs_own_condition(own_desk, plugin_module):
    """Where it doesn't hold Dynamo's own graph answers, and the report says so once."""
    plugin = plugin_module("guards_rows", COUNTING.format(guard="assert rows % 4 == 0"))
    run = pinned(f, plugin.__name__, min_region_us=0.0)
    settle(run, [torch.randn(8, 3)], [torch.randn(12, 3)])
    for n in (12, 16, 20, 10, 13, 0, 1):
        check(run, f, [torch.randn(n, 3)])
        plugin.calls.clear()
        torch.testing.assert_close(run(x := torch.randn(n, 3)), f(x))
        assert bool(plugin.calls) == (n % 4 == 0 and n > 1), n
    notes = [note for graph in ledger.graphs() for note in graph.notes]
    (told,) = [note for note in notes if "calls of other sizes" in note]
    assert "x.size()[0] % 4" in told


@pytest.mark.thorough
def test_no_backend_may_fix_a_size(own_desk, plugin_module):
    """Dynamo wouldn't compile again for another one."""
    plugin = plugin_module("fixes_rows", COUNTING.format(guard="int(rows)"))
    run = pinned(f, plugin.__name__, min_region_us=0.0)
    settle(run, [torch.randn(8, 3)], [torch.randn(12, 3)])
    for n in (12, 16):
        check(run, f, [torch.randn(n, 3)])
    rows = [row for graph in ledger.graphs() for row in graph.candidates]
    assert any("it fixes x.size()[0] to 12" in row.problem for row in rows)


def test_a_settled_call_executes_one_function_before_the_program():
    """However much has to hold of its sizes; and a program that is put later answers at once."""
    condition = SizeCondition(
        symbols={"s0": "args[0].size(0)", "s1": "args[0].size(1)"},
        names={},
        terms=("s0 % 4 == 0", "s0 < max(9, 4)"),
        sizes="(args[0].size(0),)",
        bucket="(args[0].size(0).bit_length(),)",
    )
    answers = [lambda x: "outside", lambda bucket, x: "unseen", lambda x: "program"]
    route = SizeRoute(condition, answers[2], answers[0], answers[1])
    fits, late = torch.zeros(8, 2), torch.zeros(4, 2)
    route.seen.add((4,))
    frames = []
    sys.setprofile(lambda frame, event, _: event == "call" and frames.append(frame.f_code.co_name))
    try:
        found = route.run(fits)
    finally:
        sys.setprofile(None)
    assert (found, frames) == ("program", ["by_sizes", "<lambda>"])
    assert [route.run(x) for x in (torch.zeros(6, 2), torch.zeros(12, 2))] == ["outside"] * 2
    assert route.run(late) == "unseen"
    route.put(lambda x: "trial")
    assert [route.run(x) for x in (fits, late)] == ["trial", "unseen"]


WRONG = """
    code = fuseboard.lower_eagerly(region)
    def call(args):
        results = code.call(args)
        return [one + 1 if one.shape[0] > 31 else one for one in results]
    return fuseboard.LoweredRegion(call)
"""


@pytest.mark.thorough
def test_code_that_is_wrong_for_some_sizes_never_answers_these(own_desk, plugin_module):
    """It is compared beside the calls on the first call of like sizes, and is given up."""
    plugin = plugin_module("wrong_beyond_31", WRONG)
    run = pinned(f, plugin.__name__, min_region_us=0.0)
    settle(run, [torch.randn(8, 3)], [torch.randn(12, 3)])
    for n in (12, 9, 40, 41, 12):
        check(run, f, [torch.randn(n, 3)], times=3)
    (trip,) = wait_for(lambda: {trip for graph in ledger.graphs() for trip in graph.trips})
    assert (trip.plugin, trip.instead) == (plugin.__name__, "Dynamo's own graph")
    assert "for sizes of a later call, output 0" in trip.error


def on_trial(monkeypatch):
    """A graph for any sizes whose trial nothing ends, and a function that checks a call of it."""
    monkeypatch.setattr("fuseboard.workshop.trial.Trial._winner", lambda trial: None)
    model = mlp()
    run = pinned(model, dynamic=True)

    @torch.no_grad()
    def call(rows):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(run(x), model(x))

    call(8)
    graph = life()
    end = time.monotonic() + 60
    while graph.state is not GraphState.TRIALLING:
        assert time.monotonic() < end
        assert not graph.settled
        time.sleep(0.01)
    return graph, call


@pytest.mark.thorough
def test_a_decision_in_the_middle_of_giving_up_changes_nothing(monkeypatch, own_desk):
    """A call may end the trial while a thread finds that the program is wrong."""
    graph, call = on_trial(monkeypatch)
    change = graph._machine.change

    def changed(*arguments):
        monkeypatch.setattr(graph._machine, "change", change)
        graph._decide(1)
        return change(*arguments)

    monkeypatch.setattr(graph._machine, "change", changed)
    wrong = replace(graph._chosen.compiled, run=lambda *args: pytest.fail("it is wrong"))
    graph._chosen.compiled = wrong
    graph._give_up(graph._chosen, "it is wrong")
    assert graph.state is GraphState.SETTLED
    call(8)
    graph._route.put(graph._chosen.run)  # as a call does that has seen the decision
    call(8)


@pytest.mark.thorough
def test_a_bug_beside_a_trial_refuses_the_graph_and_the_next_one_is_served(monkeypatch, own_desk):
    """The thread that compares goes on."""
    graph, call = on_trial(monkeypatch)
    monkeypatch.setattr(BySizes, "compare", lambda by_sizes: 1 / 0)
    call(40)
    assert fuseboard.wait(60)
    assert graph.state is GraphState.REFUSED
    assert any("ZeroDivisionError" in report.instead for report in ledger.graphs())
    other = torch.compile(mlp(8), backend="fuseboard", options={"margin": 1.0})
    with torch.no_grad():
        other(torch.randn(4, 8))
    assert fuseboard.wait(120)


@pytest.mark.thorough
def test_several_symbols_views_and_numbers_among_the_results():
    """Sizes that are sums and products of others; results that are sizes, and views of inputs."""

    def g(x, y, n):
        both = torch.cat([x, y, x[:2]])
        return both.softmax(0), x.view(-1), x.shape[0] * y.shape[0] + n, (x @ y.t()).relu()

    def inputs(a, b):
        return torch.randn(a, 5), torch.randn(b, 5), a + 1

    run = pinned(g, "inductor")
    settle(run, inputs(4, 7), inputs(6, 9))
    for a, b in ((6, 9), (9, 6), (6, 6), (2, 50), (33, 3), (1, 4), (0, 3)):
        check(run, g, inputs(a, b))


@pytest.mark.thorough
def test_writes_to_inputs_whose_sizes_vary():
    """Both are eager's: what is returned, and what was written to."""

    def write(x, cache):
        cache[1:3] += x[:2]
        return x.view(-1), cache, cache.sum()

    run = pinned(write, "inductor")
    for n in (4, 6, 6, 9, 9, 33, 33):
        x, cache = torch.randn(n, 4), torch.zeros(n, 4)
        other = cache.clone()
        torch.testing.assert_close(run(x, cache), write(x, other))
        torch.testing.assert_close(cache, other)
        assert fuseboard.wait(200)
        compare_all()
    assert len(made_again()) >= 2


@pytest.mark.thorough
def test_another_compile_recalls_it_for_other_first_sizes(monkeypatch):
    """As a later process does: the key has the symbols, not the sizes of the first call."""
    model = mlp()
    with torch.no_grad():
        settle(pinned(model), [torch.randn(8, 64)], [torch.randn(12, 64)])
        torch._dynamo.reset()
        ledger.clear()
        run = pinned(model, dynamic=True)
        settle(run, [torch.randn(30, 64)])  # of other symbols' names and guards: may be asked
        torch._dynamo.reset()
        ledger.clear()
        monkeypatch.setattr(process.Workshop, "ask", lambda *a: pytest.fail("it was asked"))
        run = pinned(model)
        settle(run, [torch.randn(8, 64)], [torch.randn(20, 64)])
        check(run, model, [torch.randn(20, 64)])
        torch._dynamo.reset()
        run = pinned(model, dynamic=True)
        settle(run, [torch.randn(41, 64)])
        check(run, model, [torch.randn(41, 64)])
    assert len(made_again()) == 3


def test_what_stays_within_calls_says_why():
    """Floats that change."""
    x = torch.randn(4, 3)
    scaled = pinned(lambda x, by: x * by, dynamic=True)
    torch.testing.assert_close(scaled(x, 0.5), x * 0.5)
    notes = [note for graph in ledger.graphs() for note in graph.notes]
    assert any("a float that changes from call to call" in note for note in notes)
    assert lives() == []


def test_nobody_waits_for_a_graph_of_one_size_that_gets_no_more_calls():
    """Dynamo calls the one for any sizes, whose trial ends; that of another model goes on."""
    runs = [torch.compile(mlp(width), backend="fuseboard") for width in (16, 8)]
    with torch.no_grad():
        for run, width in zip(runs, (16, 8), strict=True):
            run(torch.randn(4, width))
        before = set(lives())
        runs[0](torch.randn(5, 16))
    after = set(lives())
    (left,), (other,), (any_size,) = before - after, before & after, after - before
    assert left._kept.has_the_weights_of(any_size._kept)
    assert not other._kept.has_the_weights_of(any_size._kept)
    assert left._graph.sizes is None
    assert any_size._graph.sizes is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system with fork")
@pytest.mark.thorough
def test_a_forked_child_begins_anew():
    """While sizes are tried, and while a call of other sizes is to be compared."""
    with torch.no_grad():
        model = mlp()
        run = pinned(model, dynamic=True)
        run(torch.randn(8, 64))
        for n in (8, 40):
            if n == 40:
                assert fuseboard.wait(120)
                run(torch.randn(n, 64))
            read, write = os.pipe()
            if (child := os.fork()) == 0:
                good = False
                try:
                    x = torch.randn(n, 64)
                    good = torch.allclose(run(x), model(x), atol=1e-6)
                    good = good and fuseboard.wait(120)
                    compare_all()
                    good = good and torch.allclose(run(x), model(x), atol=1e-6)
                finally:
                    os.write(write, b"y" if good else b"n")
                    os._exit(0)
            os.waitpid(child, 0)
            assert os.read(read, 1) == b"y"
            os.close(read)
            os.close(write)
    assert life().settled
