"""Indices that Dynamo knows: a 0-d tensor by which a graph indexes, and whose number it guards on.

``cache[:, :, pos] = k`` reads the number that ``pos`` holds. Dynamo takes that from its input, and
compiles again for each other one. Its graph holds the tensor all the same, whose number nobody
knows who traces the graph again: in another process, behind a wrapper for functionalisation, or
once the graph has written to it (``pos += 1``). The number in its place means the same.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fuseboard.torch_api.nodes import graphs_in
from fuseboard.torch_api.symbols import guarded_number

#: What reads the number of a 0-d tensor among its indices, and computes nothing else with it.
_FUNCTIONS: dict[Any, slice] = {
    operator.getitem: slice(1, 2),
    operator.setitem: slice(1, 2),
    torch.narrow: slice(2, 3),
    torch.select: slice(2, 3),
}
_METHODS = {"narrow": slice(2, 3), "select": slice(2, 3), "__getitem__": slice(1, 2)}


def write_known_indices(graph: GraphModule) -> None:
    """Put numbers in the place of 0-d tensors by which a graph of Dynamo's indexes.

    Behind a write to such a tensor Dynamo doesn't know its number: it breaks the graph there.
    """
    for module in graphs_in(graph):
        inputs = module.graph.find_nodes(op="placeholder")
        values = {node: guarded_number(node) for node in inputs}
        numbers = {node: number for node, number in values.items() if number is not None}
        if not numbers:
            continue
        for node in module.graph.nodes:
            _write_indices(node, numbers)
        module.recompile()


def _write_indices(node: Node, numbers: Mapping[Node, int]) -> None:
    indices = _indices(node)
    if indices is not None and not numbers.keys().isdisjoint(node.all_input_nodes):
        args = list(node.args)
        args[indices] = map_arg(tuple(args[indices]), lambda one: numbers.get(one, one))
        node.args = tuple(args)


def _indices(node: Node) -> slice | None:
    """Which of a node's arguments are indices; None where it has none."""
    if node.op == "call_method":
        return _METHODS.get(str(node.target))
    return _FUNCTIONS.get(node.target) if node.op == "call_function" else None
