"""What a node is a view of."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

from fuseboard.ops.estimate import is_view


def view_chain(node: Node) -> Iterable[Node]:
    """A node, what it is a view of, and so on to the node that made the storage."""
    yield node
    while node.op == "call_function" and is_view(node):
        base = node.args[0] if node.args else None
        if not isinstance(base, Node):
            return
        if node.target is operator.getitem and not is_view_op(base):
            return
        node = base
        yield node


def is_view_op(node: Node) -> bool:
    """Whether a node's op returns a view, or a list of views (``split``, ``unbind``, ``chunk``)."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target.is_view)


def exposed_nodes(graph: GraphModule) -> set[Node]:
    """Nodes whose memory the caller gets, or that write to memory of the caller's."""
    ends = list(graph.graph.output_node().all_input_nodes)
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            ends += [node, *node.all_input_nodes]
    return {node for end in ends for node in view_chain(end)}
