"""The code that the board writes: what it means, and that it goes with its function."""

from __future__ import annotations

import enum
import gc
import linecache
import operator

import pytest
import torch
from torch.fx import Graph, GraphModule

from fuseboard.capture.original import fix_negative_bases
from fuseboard.run.codegen import _INFIX, Source
from fuseboard.run.eager import boxed_function
from tests.support.backends import compiled
from tests.support.values import assert_same, rnd

NUMBERS = [-2, -2.5, -0.0, float("-inf"), float("nan"), complex(0, -2), True, 3]


def graph_of(target, *args) -> GraphModule:
    """A graph that calls ``target`` on numbers, and on its input where an argument is None."""
    graph = Graph()
    x = graph.placeholder("x")
    given = tuple(x if arg is None else arg for arg in args)
    graph.output((graph.call_function(target, given),))
    return GraphModule(torch.nn.Module(), graph)


def outcome(call):
    """What a call gives, as text (NaN isn't equal to itself), or the exception's class."""
    try:
        return repr(call())
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("target", _INFIX, ids=lambda target: target.__name__)
def test_an_operator_means_what_the_graph_says(target):
    """With numbers of every sign on either side."""
    sides = [args for n in NUMBERS for args in ((n, None), (None, n), (n, n))]
    for args in sides:
        run = boxed_function(graph_of(target, *args), "f")
        for x in (2, 3.0, torch.tensor([2.0, 3.0])):
            want = outcome(lambda args=args, x=x: target(*(x if a is None else a for a in args)))
            assert outcome(lambda run=run, x=x: run([x])[0]) == want


def test_operators_inside_of_others():
    """Each has its own line, so none depends on how strongly another one binds."""
    graph = Graph()
    x = graph.placeholder("x")
    inner = graph.call_function(operator.sub, (x, -3))
    power = graph.call_function(operator.pow, (-2, inner))
    graph.output((graph.call_function(operator.mul, (power, -1)),))
    run = boxed_function(GraphModule(torch.nn.Module(), graph), "f")
    assert run([2]) == ((-2) ** (2 - -3) * -1,)


def test_literals_are_what_they_were():
    """Classes derived from plain ones print as something else."""

    class Colour(enum.IntEnum):
        RED = 2

    class Odd(float):
        def __repr__(self):
            return "odd"

    values = (Colour.RED, Odd(2.5), -0.0, float("inf"), [1, (2,)], slice(None, -1), {"a": -1}, None)
    source = Source()
    source.line(f"return {source.literal(values, {})}")
    found = source.function("f", "")()
    assert repr(found) == repr(values)
    assert [type(one) for one in found] == [type(one) for one in values]


@pytest.mark.parametrize("number", [n for n in NUMBERS if repr(n).startswith("-")], ids=repr)
def test_torchs_own_code_means_what_the_graph_says(number):
    """torch writes ``-2 ** x``."""
    for x in (torch.tensor([2.0, 3.0]), 2):
        graph = graph_of(operator.pow, number, None)
        fix_negative_bases(graph)
        assert repr(graph(x)[0]) == repr(number**x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * (-2) ** x.shape[0],
        lambda x: torch.cond(
            x.square().sum() > 0, lambda y: y * (-2) ** y.shape[0], lambda y: y - 1, (x,)
        ),
    ],
    ids=["graph", "branch"],
)
def test_powers_of_sizes(function):
    """A negative number to the power of a size, in a graph and in a branch of control flow."""
    fn = compiled(function, dynamic=True)
    with torch.no_grad():
        for n in (4, 5):
            assert_same(fn(rnd(n)), function(rnd(n)))


def test_powers_of_tensors():
    """What Dynamo's graph says of negative numbers of every kind."""

    def function(x):
        return (-2) ** x, (-0.0) ** x, complex(0, -2) ** x

    x = torch.tensor([2.0, 3.0])
    with torch.no_grad():
        assert_same(compiled(function)(x), function(x))


def test_lines_of_freed_functions_are_forgotten():
    """While a function lives tracebacks show its lines; then nothing is kept of it."""
    run = boxed_function(graph_of(operator.add, None, 1), "some_name")
    name = run.__code__.co_filename
    assert "x + 1" in "".join(linecache.getlines(name))
    with pytest.raises(TypeError):
        run(["text"])
    gc.collect()
    assert name in linecache.cache
    del run
    gc.collect()
    assert name not in linecache.cache


def test_lines_of_a_compiled_model_are_forgotten():
    """Whatever was generated for it: trials, checked and plain functions."""
    gc.collect()
    before = set(linecache.cache)
    fn = compiled(torch.relu)
    with torch.no_grad():
        fn(rnd(3))
        fn(rnd(3))
    assert any(name.startswith("<fuseboard:") for name in set(linecache.cache) - before)
    del fn
    torch._dynamo.reset()
    gc.collect()
    assert not any(name.startswith("<fuseboard:") for name in set(linecache.cache) - before)
