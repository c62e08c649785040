"""Copies of nodes and graphs, made fast.

``torch.fx.Graph.create_node`` is made for graphs that are being written: it searches arguments for
symbolic numbers and looks for a free name, three quarters of what a node costs. A copy's arguments
were searched when the node was made, and its name is free. ``GraphModule`` writes Python code that
most copies never run, and ``torch.nn.Module`` looks at each attribute that is set for a parameter.
Read against torch 2.13 (``torch/fx/graph.py``, ``torch/fx/node.py``, ``torch/fx/graph_module.py``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

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

#: What a ``GraphModule`` sets of its own: never parameters or modules.
_PLAIN = frozenset(
    {
        "graph",
        "meta",
        "shape_env",
        "training",
        "_codegen",
        "_create_node_hooks",
        "_deepcopy_hooks",
        "_erase_node_hooks",
        "_graph",
        "_replace_hooks",
        "_tracer_cls",
        "_tracer_extras",
    }
)


def graph_module(owner: torch.nn.Module, graph: Graph, name: str) -> GraphModule:
    """A GraphModule that writes its Python code only if somebody asks for it.

    :param owner: has the constants that the graph names.
    """
    return _graph_module_class()(owner, graph, class_name=name)


@functools.cache
def _graph_module_class() -> type[GraphModule]:
    try:
        from torch.fx._lazy_graph_module import _LazyGraphModule
    except ImportError:
        return GraphModule

    class Copy(_LazyGraphModule):
        def __setattr__(self, name: str, value: Any) -> None:
            if name in _PLAIN:
                object.__setattr__(self, name, value)
            else:
                super().__setattr__(name, value)

    return Copy


def copy_graph(graph: GraphModule) -> GraphModule:
    """A graph of one's own: nodes and their metadata copied, constants shared."""
    new = Graph()
    copy_nodes(graph.graph.nodes, new, {})
    return graph_module(graph, new, type(graph).__name__)


def copy_nodes(nodes: Iterable[Node], into: Graph, copies: dict[Node, Node]) -> None:
    """Append copies of nodes, with metadata of their own, to a graph that no module owns yet.

    Copies keep their nodes' names, which must differ from each other and from what is there.

    :param copies: node → its copy, for all that these nodes read; those made here are added.
    """
    append = _appender(into)
    copy_of = copies.__getitem__
    for node in nodes:
        kwargs = node.kwargs
        new = copies[node] = append(
            node.op,
            node.name,
            node.target,
            map_arg(node.args, copy_of),
            map_arg(kwargs, copy_of) if kwargs else kwargs,
            node.type,
        )
        new.meta.update(node.meta)


def part_of_graph(
    inputs: Iterable[Node], body: Iterable[Node], outputs: Iterable[Node]
) -> tuple[Graph, list[Node]]:
    """A graph of copies of some of a graph's nodes, and its placeholders; no module owns it yet.

    :param inputs: nodes that become placeholders, with their names and metadata.
    :param body: nodes in an order in which they can run.
    """
    graph = Graph()
    append = _appender(graph)
    copies: dict[Node, Node] = {}
    for node in inputs:
        new = copies[node] = append("placeholder", node.name, node.name, (), {}, None)
        new.meta.update(node.meta)
    placeholders = list(copies.values())
    copy_nodes(body, graph, copies)
    results = tuple(copies[node] for node in outputs)
    graph.create_node("output", "output", (results,), name="output")
    return graph, placeholders


Append = Callable[[str, str, Any, Any, Any, Any], Node]


def _appender(graph: Graph) -> Append:
    """What appends a node of an op, name, target, args, kwargs and type to a graph."""
    if _is_known():
        return _quick_appender(graph)
    return lambda op, name, target, args, kwargs, kind: graph.create_node(
        op, target, args, kwargs, name, kind
    )


def _quick_appender(graph: Graph) -> Append:
    """What ``create_node`` does, less what the module's docstring names."""
    names = graph._graph_namespace._obj_to_name
    use = graph._graph_namespace._used_names.add
    link = graph._root.prepend  # the root closes the ring of nodes
    found = graph._find_nodes_lookup_table.table
    calls: dict[int, dict[Node, None]] = {}  # a part of that, by identity: hashing ops is slow

    def append(op: str, name: str, target: Any, args: Any, kwargs: Any, kind: Any) -> Node:
        node = Node(graph, name, op, target, args, kwargs, kind)
        use(name)
        names[node] = name
        link(node)
        if op != "call_function":
            found[op, None][node] = None
        else:
            same = calls.get(id(target))
            if same is None:
                same = calls[id(target)] = found[op, target]
            same[node] = None
        graph._len += 1
        return node

    return append


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
