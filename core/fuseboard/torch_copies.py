"""Copies of nodes and graphs: the part of :mod:`fuseboard.torch_internals` about making them fast.

``torch.fx.Graph.create_node`` is made for graphs that are being written: it searches arguments for
symbolic numbers and looks for a free name, three quarters of what a node costs. A copy's arguments
were searched when the node was made, and its name is free. Read against torch 2.13
(``torch/fx/graph.py``, ``torch/fx/node.py``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fuseboard import torch_internals

#: A graph's attributes; all that ``create_node`` touches is among them.
_GRAPH = {
    "_root",
    "_insert",
    "_len",
    "_graph_namespace",
    "_find_nodes_lookup_table",
    "_used_names",
    "_owning_module",
    "_tracer_cls",
    "_tracer_extras",
    "_codegen",
    "_co_fields",
}
_NAMESPACE = {"_obj_to_name", "_used_names", "_base_count"}
_NODE = ["graph", "name", "op", "target", "args", "kwargs", "return_type"]


def copy_graph(graph: GraphModule) -> GraphModule:
    """A graph of one's own: nodes and their metadata copied, constants shared."""
    new = Graph()
    copy_nodes(graph.graph.nodes, new, {})
    return torch_internals.graph_module(graph, new, type(graph).__name__)


def copy_nodes(nodes: Iterable[Node], into: Graph, copies: dict[Node, Node]) -> None:
    """Append copies of nodes, with metadata of their own, to a graph that no module owns yet.

    Copies keep their nodes' names, which must differ from each other and from what is there.

    :param copies: node → its copy, for all that these nodes read; those made here are added.
    """
    if _is_known():
        _append(nodes, into, copies)
        return
    for node in nodes:
        copies[node] = into.node_copy(node, copies.__getitem__)


def _append(nodes: Iterable[Node], into: Graph, copies: dict[Node, Node]) -> None:
    """What ``create_node`` does, less what the module's docstring names."""
    names = into._graph_namespace
    found = into._find_nodes_lookup_table.table
    append = into._root.prepend  # the root closes the ring of nodes
    copy_of = copies.__getitem__
    for node in nodes:
        op, target, name = node.op, node.target, node.name
        kwargs = node.kwargs
        new = copies[node] = Node(
            into,
            name,
            op,
            target,
            map_arg(node.args, copy_of),
            map_arg(kwargs, copy_of) if kwargs else kwargs,
            node.type,
        )
        new.meta.update(node.meta)
        names._used_names.add(name)
        names._obj_to_name[new] = name
        append(new)
        found[op, target if op == "call_function" else None][new] = None
        into._len += 1


@functools.cache
def _is_known() -> bool:
    """Whether graphs and nodes are made of what this module knows, and of nothing else."""
    graph = Graph()
    names = getattr(graph, "_graph_namespace", None)
    table = getattr(getattr(graph, "_find_nodes_lookup_table", None), "table", None)
    return (
        vars(graph).keys() <= _GRAPH
        and vars(names).keys() == _NAMESPACE
        and table == {}
        and list(inspect.signature(Node).parameters) == _NODE
    )
