"""Claims of whole patterns: what a backend has one kernel for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node

from fuseboard.contracts import Claim, Decline
from fuseboard.fuse.patterns.form import Form, form_of
from fuseboard.fuse.patterns.matching import Matcher, Misses
from fuseboard.fuse.patterns.pattern import Pattern
from fuseboard.fuse.patterns.search import Search

#: A pattern, a small function with tensors and numbers to trace it with, or a graph.
Claimed = Pattern | tuple[Callable[..., Any], Sequence[Any]] | GraphModule | Graph


def claim_patterns(graph: GraphModule, patterns: Sequence[Claimed]) -> list[Claim | Decline]:
    """Claim each place where a pattern occurs, all of its nodes or none; decline all other nodes.

    What a pattern and its ``check`` are, :class:`fuseboard.Pattern` says; ``(function, examples)``
    is one without a name, and a graph of ATen ops one whose numbers and sizes are as they are. Only
    what it returns may be read from elsewhere. The first of several patterns in order gets a node
    that both would match.

    Ops are compared as they stand in ``graph``: a backend that has patterns of small ops asks for
    these in ``fuseboard_decompositions``.

    :raises TypeError: a pattern is something else.
    :raises ValueError: a graph has no op.
    :raises PatternError: a pattern can't be traced.
    """
    search = Search(graph, "inference", {})
    taken: set[Node] = set()
    claims: list[Claim] = []
    for number, pattern in enumerate(patterns):
        for nodes in _places(graph, pattern, number, search):
            whole = nodes | {user for node in nodes for user in node.users if _is_item(user)}
            if not whole & taken:
                taken |= whole
                names = frozenset(node.name for node in whole)
                claims.append(Claim(nodes=names, native=names, together=True))
    declines = [
        Decline(node.name, f"in none of {len(patterns)} patterns")
        for node in graph.graph.nodes
        if node.op == "call_function" and node not in taken
    ]
    return [*claims, *declines]


def _places(
    graph: GraphModule, pattern: Any, number: int, search: Search
) -> Iterator[frozenset[Node]]:
    """The nodes of each occurrence, in graph order."""
    if isinstance(pattern, tuple) and len(pattern) == 2 and callable(pattern[0]):
        pattern = Pattern(f"patterns[{number}]", *pattern)
    if isinstance(pattern, Pattern):
        for found in search.find(pattern, Misses()):
            yield frozenset(found.match.nodes)
    elif isinstance(pattern, GraphModule | Graph):
        matcher = Matcher(_form_of_graph(pattern, number), True, Misses())
        for node in matcher.places(graph.graph):
            for bound in matcher.at(node):
                yield frozenset(one for own, one in bound.items() if own.op == "call_function")
                break
    else:
        raise TypeError(
            f"patterns[{number}] is a {type(pattern).__name__}; allowed: a Pattern, a tuple "
            "(function, examples), a GraphModule or a Graph"
        )


def _form_of_graph(pattern: GraphModule | Graph, number: int) -> Form:
    graph = pattern.graph if isinstance(pattern, GraphModule) else pattern
    if not any(node.op == "call_function" for node in graph.nodes):
        raise ValueError(f"patterns[{number}] has no op")
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    results = graph.output_node().all_input_nodes
    whole = Graph()
    copies: dict[Node, Node] = {}
    whole.graph_copy(graph, copies)
    whole.output([copies[node] for node in results])
    for node in whole.nodes:
        node.meta.clear()  # the sizes and dtypes that it was traced with
    return form_of(whole, names, len(results))


def _is_item(node: Node) -> bool:
    return node.target is operator.getitem
