"""Finding composites in a graph, claiming them whole, putting one call in the place of each."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from fuseboard.contracts import Claim, Composite, Decline
from fuseboard.fuse.composites import attention, losses, norms, rotary
from fuseboard.fuse.composites.definition import Reader

#: Op → what reads it as a composite; the larger composite comes first.
_READERS: dict[Any, Reader] = {**losses.READERS, **attention.READERS, **norms.READERS}
_WRITTEN = (norms, rotary)


def find_composites(
    graph: GraphModule,
    names: Collection[str] | None = None,
    fits: Callable[[Composite], bool] = lambda found: True,
) -> list[Composite]:
    """The composites of a graph, in its order; none overlaps another.

    :param graph: of ATen ops, with fake values; of a forward or backward, of inference or a region.
    :param names: those that are looked for; None for all.
    :param fits: whether one is wanted; one that isn't leaves its nodes to others.
    """
    taken: set[Node] = set()
    found: list[Composite] = []
    for one in (*_of_ops(graph), *_written_out(graph, names)):
        wanted = names is None or one.name in names
        if wanted and taken.isdisjoint(one.nodes) and fits(one):
            taken.update(one.nodes)
            found.append(one)
    return sorted(found, key=lambda one: one.nodes[-1])


def _of_ops(graph: GraphModule) -> Iterator[Composite]:
    for target, read in _READERS.items():
        for node in graph.graph.find_nodes(op="call_function", target=target):
            found = read(node)
            if found is not None:
                yield found


def _written_out(graph: GraphModule, names: Collection[str] | None) -> Iterator[Composite]:
    for module in _WRITTEN:
        ways = {way.name: way for way in module.WAYS}
        wanted = [n for n, way in ways.items() if names is None or way.composite in names]
        for match in module.PATTERNS.find(graph, "inference", {}, wanted):
            found = ways[match.pattern].read(match)
            if found is not None:
                yield found


def claim_composites(
    graph: GraphModule,
    names: Collection[str],
    fits: Callable[[Composite], bool] = lambda found: True,
) -> list[Claim | Decline]:
    """Claim each composite of some names, all of its nodes or none; decline all other nodes.

    :param fits: whether the backend takes one: its dtypes, sizes, results.
    """
    found = find_composites(graph, names, fits)
    wholes = [frozenset(node.name for node in one.nodes) for one in found]
    claimed = frozenset().union(*wholes)
    reason = f"in no composite of {', '.join(sorted(names))} that fits"
    return [
        *(Claim(nodes=whole, native=whole, together=True) for whole in wholes),
        *(
            Decline(node.name, reason)
            for node in graph.graph.nodes
            if node.op == "call_function" and node.name not in claimed
        ),
    ]


def replace_composite(
    graph: GraphModule,
    found: Composite,
    function: Callable[..., Any],
    args: Sequence[Any] | None = None,
    results: Mapping[int, Node] | None = None,
) -> Node:
    """Put one call in the place of a composite; its nodes go, as far as nothing else reads them.

    Of several composites that were found together one may be replaced after the other, also where
    the result of one is an argument of the next.

    :param function: returns the composite's result, or a tuple where it has several.
    :param args: what it is called with; None for the composite's arguments in their order.
    :param results: of a function that returns a tuple, position → the node whose value that is;
        None for the composite's results in their order.
    :returns: the call.
    """
    args = tuple(map(_standing, found.arguments.values() if args is None else args))
    if results is None and len(found.results) > 1:
        results = dict(enumerate(found.results.values()))
    with graph.graph.inserting_after(_last_of(graph, args)):
        call = graph.graph.call_function(function, args)
    if results is None:
        (node,) = found.results.values()
        call.meta = dict(node.meta)
        _put(node, call)
    else:
        _put_items(graph, call, results)
    for node in sorted({*found.nodes, *(results or {}).values()}, reverse=True):
        if not node.users:
            graph.graph.erase_node(node)
    return call


#: In the ``meta`` of a node that a composite was found with: what stands in its place since then.
_STANDS_FOR = "fuseboard_stands_for"


def _put(node: Node, new: Node) -> None:
    node.replace_all_uses_with(new)
    node.meta[_STANDS_FOR] = new


def _standing(value: Any) -> Any:
    """An argument as it is by now: the result of a composite may be that of another one."""
    while isinstance(value, Node) and _STANDS_FOR in value.meta:
        value = value.meta[_STANDS_FOR]
    return value


def _put_items(graph: GraphModule, call: Node, results: Mapping[int, Node]) -> None:
    """A node for each item of a call, in the place of the one whose value it is."""
    call.meta["val"] = tuple(
        results[place].meta["val"] if place in results else None
        for place in range(max(results) + 1)
    )
    after = call
    for place, node in results.items():
        with graph.graph.inserting_after(after):
            after = graph.graph.call_function(operator.getitem, (call, place))
        after.meta = dict(node.meta)
        _put(node, after)


def _last_of(graph: GraphModule, args: Iterable[Any]) -> Node:
    """The node after which all arguments are there."""
    last: Node = max(one for one in args if isinstance(one, Node))
    inputs: list[Node] = graph.graph.find_nodes(op="placeholder")
    return max(inputs) if last.op == "placeholder" else last
