"""Claims of whole patterns: what a backend has one kernel for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

from fuseboard.contracts import Claim, Decline

#: A small function on tensors with tensors to trace it with, or a graph.
Pattern = tuple[Callable[..., Any], Sequence[Any]] | GraphModule | Graph


def claim_patterns(graph: GraphModule, patterns: Sequence[Pattern]) -> list[Claim | Decline]:
    """Claim each place where a pattern occurs, all of its nodes or none; decline all other nodes.

    A pattern is ``(function, example inputs)``, traced down to ATen ops, or a graph of them. Its
    inputs match any value; ops and constants must be equal; only what the pattern returns may be
    read from elsewhere. Shapes and dtypes of the examples don't matter beyond the ops that they
    lead to. The first of several patterns in order gets a node that both would match.

    Ops are compared as they stand in ``graph``: a backend that has patterns of small ops asks for
    these in ``fuseboard_decompositions``.

    :raises TypeError: a pattern is something else.
    :raises ValueError: a pattern has no op, or returns nothing.
    """
    taken: set[str] = set()
    claims: list[Claim] = []
    for number, pattern in enumerate(patterns):
        for names in _places(graph, _as_graph(pattern, number)):
            if not names & taken:
                taken |= names
                claims.append(Claim(nodes=names, native=names, together=True))
    declines = [
        Decline(node.name, f"in none of {len(patterns)} patterns")
        for node in graph.graph.nodes
        if node.op == "call_function" and node.name not in taken
    ]
    return [*claims, *declines]


def _as_graph(pattern: Any, number: int) -> Graph:
    """A pattern as a graph."""
    if isinstance(pattern, tuple) and len(pattern) == 2 and callable(pattern[0]):
        from torch.fx.experimental.proxy_tensor import make_fx

        function, examples = pattern
        with torch.no_grad():
            traced = make_fx(function, tracing_mode="fake")(*examples)
        traced.graph.eliminate_dead_code()
        graph = traced.graph
    elif isinstance(pattern, GraphModule | Graph):
        graph = pattern.graph if isinstance(pattern, GraphModule) else pattern
    else:
        raise TypeError(
            f"patterns[{number}] is a {type(pattern).__name__}; allowed: a tuple (function, "
            "example inputs), a GraphModule or a Graph"
        )
    if not any(node.op == "call_function" for node in graph.nodes):
        raise ValueError(f"patterns[{number}] has no op")
    return graph


def _places(graph: GraphModule, pattern: Graph) -> list[frozenset[str]]:
    """The nodes of each occurrence, in graph order."""
    matcher = SubgraphMatcher(pattern, match_output=False, match_placeholder=False)
    nodes = {node.name: node for node in graph.graph.nodes}
    position = {name: number for number, name in enumerate(nodes)}
    found = []
    for match in matcher.match(_without_dead_items(graph.graph)):
        inside = {
            nodes[node.name]
            for own, node in match.nodes_map.items()
            if own.op == "call_function" and node.op == "call_function"
        }
        inside |= {user for node in inside for user in node.users if _is_item(user)}
        found.append(frozenset(node.name for node in inside))
    return sorted(found, key=lambda names: min(position[name] for name in names))


def _without_dead_items(graph: Graph) -> Graph:
    """A copy without items that nobody reads: to the matcher they are readers of their own."""
    copied = Graph()
    copied.output(copied.graph_copy(graph, {}))
    for node in reversed(copied.nodes):
        if _is_item(node) and not node.users:
            copied.erase_node(node)
    return copied


def _is_item(node: Node) -> bool:
    return node.target is operator.getitem
