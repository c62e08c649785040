"""The ``eager`` backend: a region's ops called one by one, in generated flat code.

Always available, always right: every other backend is compared with it and falls back to it.
Plugins use it, too, where all of their work is rewriting the region's graph.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fuseboard.contracts import (
    BackendInfo,
    Boxed,
    Claim,
    Decline,
    GraphKind,
    LoweredRegion,
    Region,
)
from fuseboard.hookspecs import hookimpl
from fuseboard.ops.liveness import unused_after
from fuseboard.run.codegen import Source


@hookimpl
def fuseboard_backend() -> BackendInfo:
    """Any device that torch has, training, dynamic shapes, nothing to compile."""
    return BackendInfo(
        name="eager",
        device_types=frozenset({"cpu", "cuda", "meta", "mps", "xpu"}),
        training=True,
        dynamic_shapes=True,
        compiles_quickly=True,
        fingerprint=str(torch.__version__),
    )


@hookimpl
def fuseboard_claim(graph: GraphModule, kind: GraphKind) -> list[Claim | Decline]:
    """Everything."""
    nodes = frozenset(node.name for node in graph.graph.nodes if node.op == "call_function")
    return [Claim(nodes=nodes, native=nodes)]


@hookimpl
def fuseboard_lower(region: Region, inputs: Sequence[Any]) -> LoweredRegion:
    """Flat code that calls the ops."""
    return lower_eagerly(region)


def lower_eagerly(region: Region) -> LoweredRegion:
    """A region as flat Python code that calls its ops in graph order.

    Values are freed right after their last use. The callable is boxed: it empties its list.
    """
    call = boxed_function(region.graph, region.name)
    zeros = torch.ops.aten._efficientzerotensor.default
    if region.graph.graph.find_nodes(op="call_function", target=zeros, sort=False):
        return LoweredRegion(call=_with_memory(call))
    return LoweredRegion(call=call)


def _with_memory(call: Boxed) -> Boxed:
    """Zeros that forward-mode derivatives have without memory get some: others read it."""

    def run(args: list[Any]) -> tuple[Any, ...]:
        return tuple(
            value.clone() if isinstance(value, torch.Tensor) and value._is_zerotensor() else value
            for value in call(args)
        )

    return run


def boxed_function(graph: GraphModule, name: str) -> Boxed:
    """Compile a graph that returns a flat tuple into a boxed function."""
    source = Source()
    function_name = source.unique(name.replace(".", "_"))
    names: dict[Node, str] = {}
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        names[node] = source.unique(node.name)
    if placeholders:
        source.line(f"{', '.join(names[node] for node in placeholders)}, = args")
    source.line("args.clear()")
    write_nodes(source, graph.graph, graph, names)
    return source.function(function_name, "args")


def write_nodes(
    source: Source, graph: Graph, owner: torch.nn.Module, names: dict[Node, str]
) -> None:
    """Write every computing node and the return of a graph."""
    unused = unused_after(graph)
    for node in graph.nodes:
        if node.op == "get_attr":
            names[node] = source.bind(operator.attrgetter(str(node.target))(owner), node.name)
        elif node.op == "call_function":
            names[node] = source.unique(node.name)
            source.line(f"{names[node]} = {source.call(node, names)}")
            # A getitem's source is dropped with it: the tuple would keep its tensors alive.
            if unused[node]:
                source.line(f"del {', '.join(names[used] for used in unused[node])}")
    results: Any = graph.output_node().args[0]
    source.line(f"return {source.literal(tuple(results), names)}")
