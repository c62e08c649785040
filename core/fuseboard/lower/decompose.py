"""Bring a graph down to the level that a backend wants."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard import torch_internals


def decompose(graph: GraphModule, table: dict[Any, Callable[..., Any]]) -> GraphModule:
    """The graph with the ops of ``table`` replaced by what they decompose into.

    Fake inputs come from the placeholders' ``meta["val"]``; stack traces are kept. A graph that
    holds no op of the table is returned as it is, without the cost of a retrace.

    :param graph: an ATen graph; it isn't changed.
    :param table: op overload → function, as ``torch._decomp.get_decompositions`` returns.
    """
    if not _holds_any(graph, table):
        return graph
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    lowered = torch_internals.retrace(graph, _distinct(inputs), table)
    old = [node for node in graph.graph.nodes if node.op == "placeholder"]
    new = [node for node in lowered.graph.nodes if node.op == "placeholder"]
    for before, after in zip(old, new, strict=True):
        after.meta.update(before.meta)
    return lowered


def _holds_any(graph: GraphModule, table: dict[Any, Callable[..., Any]]) -> bool:
    """Whether an op of the table is in the graph, or in a graph that an op of it is given."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in table:
            return True
        if node.op == "get_attr":
            held = operator.attrgetter(str(node.target))(graph)
            if isinstance(held, GraphModule) and _holds_any(held, table):
                return True
    return False


def _distinct(inputs: Sequence[Any]) -> list[Any]:
    """Fake inputs, each an object of its own.

    Tracing knows a value by its object, and two inputs may have one: the calls of a
    ``nested_compile_region`` have the same fake results, which are then saved for the backward.
    """
    seen: set[int] = set()
    found = []
    for value in inputs:
        repeated = isinstance(value, torch.Tensor) and id(value) in seen
        seen.add(id(value))
        found.append(value.detach() if repeated else value)
    return found
