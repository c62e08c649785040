"""Where a backend's values part from the right ones: the first op is found, in few tries."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

from fuseboard.profile.judge.divergence import first_divergence, prefix, source_line
from fuseboard.profile.judge.reference import make_reference
from fuseboard.profile.judge.values import judge
from tests.support.references import captured, traced
from tests.support.values import rnd

aten = torch.ops.aten


class Wrong:
    """A compiler that gets one op wrong, and otherwise is eager.

    :ivar compiled: how many computing nodes each graph had that was compiled.
    """

    def __init__(self, target: Any, change: Callable[[Any], Any], fails_at: int = -1) -> None:
        self.target, self.change, self.fails_at = target, change, fails_at
        self.compiled: list[int] = []

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        self.compiled.append(len(nodes))
        if len(self.compiled) == self.fails_at:
            raise RuntimeError("can't compile this")

        class Run(torch.fx.Interpreter):
            def call_function(inner, target: Any, args: Any, kwargs: Any) -> Any:
                result = super().call_function(target, args, kwargs)
                return self.change(result) if target is self.target else result

        return lambda args: Run(graph).run(*args)


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(10):
        x = F.gelu(x @ w)
        x = x / (x.norm() + 1)
    x = torch.softmax(x, -1)
    for _ in range(10):
        x = torch.tanh(x) @ w
    return x


def test_the_first_wrong_op_is_found() -> None:
    """In a chain of many ops, by binary search, with what is wrong there."""
    x, w = rnd(5, 8), rnd(8, 8, seed=1)
    graph = traced(chain, x, w)
    steps = [node for node in graph.graph.nodes if node.op == "call_function"]
    lower = Wrong(aten._softmax.default, lambda value: value * 1.001)
    found = first_divergence(graph, [x, w], lower)
    assert found is not None
    assert (found.target, found.within) == ("aten._softmax.default", 1)
    assert graph.graph.find_nodes(op="call_function", target=aten._softmax.default)[0].name == (
        found.node
    )
    assert "times beyond the limit" in found.verdict.problem
    assert len(lower.compiled) <= 1 + len(steps).bit_length()


def test_a_right_region_has_no_parting() -> None:
    """One try shows that all is well."""
    x, w = rnd(5, 8), rnd(8, 8, seed=1)
    lower = Wrong(None, lambda value: value)
    assert first_divergence(traced(chain, x, w), [x, w], lower) is None
    assert len(lower.compiled) == 1


def test_an_op_of_several_results() -> None:
    """Items come with the op that makes them, and the wrong one of them is found."""

    def function(x: torch.Tensor) -> torch.Tensor:
        values, places = torch.topk(x * 2, 3)
        return values.sum(-1) + places.sum(-1) * 0.1

    x = rnd(4, 9)
    lower = Wrong(aten.topk.default, lambda pair: (pair[0], pair[1].flip(-1)))
    graph = traced(function, x)
    found = first_divergence(graph, [x], lower)
    assert found is None  # a sum doesn't care
    lower = Wrong(aten.topk.default, lambda pair: (pair[0], (pair[1] + 1) % 9))
    found = first_divergence(graph, [x], lower)
    assert found is not None
    assert found.target == "aten.topk.default"
    assert "elements, eager in 0" in found.verdict.problem


def test_tries_time_and_failures_bound_the_search() -> None:
    """What is left then is told as a stretch, and no exception leaves the search."""
    x, w = rnd(5, 8), rnd(8, 8, seed=1)
    graph = traced(chain, x, w)
    total = sum(node.op == "call_function" for node in graph.graph.nodes)
    for limits in ({"tries": 3}, {"budget_s": 0.0}, {}):
        lower = Wrong(aten._softmax.default, lambda v: v * 1.001, -1 if limits else 3)
        found = first_divergence(graph, [x, w], lower, **limits)  # type: ignore[arg-type]
        assert found is not None
        assert found.within > 1
        assert len(lower.compiled) == (1 if "budget_s" in limits else 3)
    assert total > 60


def test_a_whole_that_cant_be_compiled_raises() -> None:
    """The search can say nothing then."""
    x, w = rnd(5, 8), rnd(8, 8, seed=1)
    with pytest.raises(RuntimeError, match="can't compile this"):
        first_divergence(traced(chain, x, w), [x, w], Wrong(None, lambda v: v, 1))


def test_inputs_and_graph_are_left_alone() -> None:
    """A backend that overwrites what it is given overwrites copies."""
    x, w = rnd(5, 8), rnd(8, 8, seed=1)
    graph = traced(chain, x, w)
    code, before = graph.code, (x.clone(), w.clone())

    def lower(part: GraphModule, inputs: Sequence[Any]) -> Any:
        part.graph.erase_node(part.graph.output_node())  # it is its own copy

        def call(args: list[Any]) -> Any:
            for value in args:
                value.zero_()
            return []

        return call

    found = first_divergence(graph, [x, w], lower)
    assert found is not None
    assert found.verdict.problem.startswith("returned 0 outputs")
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])
    assert graph.code == code


@pytest.mark.parametrize("model", ["attention", "convolutions"])
def test_every_prefix_runs(model: str) -> None:
    """Each prefix of a forward and backward graph is a graph that gives what eager gives."""
    module: nn.Module
    if model == "attention":
        module, x = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), rnd(2, 5, 16)
    else:
        module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        x = rnd(2, 2, 8, 8)
    for one in captured(module, x.requires_grad_(), backward=True):
        steps = [
            node
            for node in one.graph.graph.nodes
            if node.op == "call_function" and node.target is not operator.getitem
        ]
        for count in range(1, len(steps) + 1):
            part = prefix(one.graph, count)
            part.graph.lint()
            with torch.no_grad():
                reference = make_reference(part, one.inputs)
                assert judge(reference, part(*one.inputs)).ok
        assert len(steps) > 3


def test_the_users_line_is_told() -> None:
    """The source is the line of the user's code that the op comes from, or its module."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y.exp()  # line

    with torch.no_grad():
        (found,) = captured(function, rnd(3))
    lower = Wrong(aten.exp.default, lambda value: value + 1)
    divergence = first_divergence(found.graph, found.inputs, lower)
    assert divergence is not None
    lines = open(__file__, encoding="utf-8").read().splitlines()
    number = 1 + next(i for i, line in enumerate(lines) if line.endswith("# line"))
    assert divergence.source == f"{__file__}:{number}"
    graph = traced(torch.exp, rnd(3))
    node = graph.graph.find_nodes(op="call_function", target=aten.exp.default)[0]
    node.meta = {"nn_module_stack": {"a": ("L['self'].mlp", nn.ReLU)}}
    assert source_line(node) == "module mlp (ReLU)"
    node.meta = {"nn_module_stack": {"a": ("L['self']", nn.ReLU)}}
    assert source_line(node) == "module ReLU"
    node.meta = {}
    assert source_line(node) == ""
