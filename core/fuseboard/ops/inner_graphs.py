"""The graphs that ops like ``cond``, ``while_loop`` and ``scan`` hold, and what they run on."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node


@dataclass(frozen=True)
class InnerGraph:
    """A graph that a higher-order op calls on its operands, in order.

    :ivar holder: the ``get_attr`` node.
    :ivar operands: nodes and numbers, one for each placeholder; None for what differs from
        iteration to iteration of a loop.
    """

    holder: Node
    graph: GraphModule
    operands: tuple[Any, ...]


def inner_nodes(node: Node) -> Iterator[Node]:
    """The ops in the graphs that a higher-order op is given, at any depth."""
    for used in node.all_input_nodes:
        held = _held_by(used)
        for inner in held.graph.nodes if held is not None else ():
            if inner.op == "call_function":
                yield inner
                yield from inner_nodes(inner)


def called_graphs(node: Node) -> list[InnerGraph]:
    """The graphs that a higher-order op calls as they are; none for ops that do more with them.

    Flex attention maps its graphs over scores (``vmap``), ``map`` and ``associative_scan`` may do
    so: what they call isn't known here. Signatures: ``torch/_higher_order_ops`` of 2.13.
    """
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    args: Any = node.args
    name = node.target.name()
    if node.kwargs:
        return []
    if name == "cond" and len(args) == 4:
        return _of(args[1:3], args[3])
    if name == "while_loop" and len(args) == 4:
        return _of(args[:2], (*[None] * len(args[2]), *args[3]))
    if name == "scan" and len(args) == 4:
        return _of(args[:1], (*[None] * (len(args[1]) + len(args[2])), *args[3]))
    if name == "invoke_subgraph" and len(args) > 1:
        return _of(args[:1], args[2:])
    return []


def _of(holders: Sequence[Node], operands: Sequence[Any]) -> list[InnerGraph]:
    found = []
    for holder in holders:
        graph = _held_by(holder)
        if graph is None or len(graph.graph.find_nodes(op="placeholder")) != len(operands):
            return []
        found.append(InnerGraph(holder, graph, tuple(operands)))
    return found


def _held_by(node: Any) -> GraphModule | None:
    """The graph behind a ``get_attr`` node."""
    owner = node.graph.owning_module if isinstance(node, Node) and node.op == "get_attr" else None
    held = operator.attrgetter(str(node.target))(owner) if owner is not None else None
    return held if isinstance(held, GraphModule) else None
