"""Graphs without symbols, made from graphs that have them.

For backends without dynamic shapes under ``dynamic = "specialise"``: they see plain sizes, no
arithmetic on sizes, and no inputs that are numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fuseboard.errors import LoweringError
from fuseboard.torch_api import symbols as torch_symbols
from fuseboard.torch_api.copies import graph_module

#: What speaks of the symbolic value that a node had.
_STALE = ("val", "tensor_meta", "example_value", "unbacked_bindings")


@dataclass(frozen=True)
class StaticGraph:
    """A region's graph for one combination of sizes.

    :ivar keeps: positions of the region's inputs that it takes: all that aren't numbers.
    """

    graph: GraphModule
    keeps: tuple[int, ...]


def is_symbolic(graph: GraphModule) -> bool:
    """Whether anything in a graph has symbolic sizes, or is a symbolic number."""
    return any(torch_symbols.symbolic_numbers(node.meta.get("val")) for node in graph.graph.nodes)


def as_in_the_example(graph: GraphModule) -> GraphModule:
    """A copy of a whole graph with the sizes of the call that is being compiled.

    Nodes keep their names. Sizes that only data decide stay symbolic. It is for looking at: two
    values that share storage in the one may not in the other.
    """
    mode = torch_symbols.static_fake_mode()
    copier = _Copier(graph)
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        plain = value if torch_symbols.why_unknown(value) else _plain(value, mode)
        if node.op != "output" and isinstance(plain, int | float | bool):
            copier.fold(node, plain)
        else:
            copier.copy(node, plain)
    return copier.done()


def with_sizes(graph: GraphModule, inputs: Sequence[Any], mode: Any) -> StaticGraph:
    """A region's graph for inputs of certain sizes: everything in it is computed again.

    :param inputs: one for each placeholder, fake tensors of ``mode`` and plain numbers.
    :raises LoweringError: something in it can't be computed without running it.
    """
    copier = _Copier(graph)
    values: dict[Node, Any] = {}
    keeps: list[int] = []
    given = iter(inputs)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            value = next(given)
            if not isinstance(value, int | float):
                keeps.append(len(values))
        elif node.op == "call_function":
            value = _computed(node, values, mode)
        elif node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(graph)
        else:
            if any(isinstance(values[n], int | float) for n in node.all_input_nodes):
                raise LoweringError("a size among its outputs: it can't be specialised")
            value = None
        values[node] = value
        if node.op in ("placeholder", "call_function") and _is_folded(node, value):
            copier.fold(node, value)
        else:
            copier.copy(node, value)
    return StaticGraph(copier.done(), tuple(keeps))


class _Copier:
    """Copies a graph, with some nodes folded into plain numbers."""

    def __init__(self, graph: GraphModule) -> None:
        self._owner = graph
        self._graph = Graph()
        self._nodes: dict[Node, Any] = {}

    def fold(self, node: Node, value: Any) -> None:
        """Put a number in a node's place."""
        self._nodes[node] = value

    def copy(self, node: Node, value: Any) -> None:
        # node_copy wants nodes: those that became numbers go into the arguments afterwards.
        new = self._graph.create_node(
            node.op,
            node.target,
            map_arg(node.args, self._of),
            map_arg(node.kwargs, self._of),
            node.name,
            node.type,
        )
        new.meta = {key: item for key, item in node.meta.items() if key not in _STALE}
        if node.op in ("placeholder", "call_function"):
            new.meta["val"] = value
        self._nodes[node] = new

    def done(self) -> GraphModule:
        return graph_module(self._owner, self._graph, "Static")

    def _of(self, node: Node) -> Any:
        return self._nodes[node]


def _is_folded(node: Node, value: Any) -> bool:
    """Numbers, and checks of nothing but numbers: they have been made."""
    if isinstance(value, int | float):
        return True
    return (
        node.op == "call_function"
        and value is None
        and not any(isinstance(used.meta.get("val"), torch.Tensor) for used in node.all_input_nodes)
    )


def _computed(node: Node, values: dict[Node, Any], mode: Any) -> Any:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        value = node.meta.get("val")
        if torch_symbols.symbolic_numbers(value):
            raise LoweringError(f"{node.target} holds a graph: it can't be specialised")
        return _plain(value, mode)
    look_up: Callable[[Node], Any] = values.__getitem__
    args, kwargs = map_arg(node.args, look_up), map_arg(node.kwargs, look_up)
    return torch_symbols.run_fake(mode, node.target, args, kwargs)


def _plain(value: Any, mode: Any) -> Any:
    """A value as it is in the example that is being compiled."""
    if isinstance(value, list | tuple):
        return type(value)(_plain(item, mode) for item in value)
    if isinstance(value, torch.Tensor):
        return torch_symbols.static_fake(mode, value)
    return torch_symbols.in_the_example(value)
