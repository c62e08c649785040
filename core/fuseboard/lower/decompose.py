"""Bring a graph down to the level that a backend wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from fuseboard import torch_internals


def decompose(graph: GraphModule, table: dict[Any, Callable[..., Any]]) -> GraphModule:
    """The graph with the ops of ``table`` replaced by what they decompose into.

    Fake inputs come from the placeholders' ``meta["val"]``; stack traces are kept. A graph that
    holds no op of the table is returned as it is, without the cost of a retrace.

    :param graph: an ATen graph; it isn't changed.
    :param table: op overload → function, as ``torch._decomp.get_decompositions`` returns.
    """
    if not any(node.op == "call_function" and node.target in table for node in graph.graph.nodes):
        return graph
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    lowered = torch_internals.retrace(graph, inputs, table)
    old = [node for node in graph.graph.nodes if node.op == "placeholder"]
    new = [node for node in lowered.graph.nodes if node.op == "placeholder"]
    for before, after in zip(old, new, strict=True):
        after.meta.update(before.meta)
    return lowered
