"""How the graphs that a higher-order op calls are cut, where a backend can't have the op itself."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from fuseboard.torch_api.copies import copy_graph


@dataclass(frozen=True)
class InnerPlan:
    """A plan for one graph that a higher-order op calls. It has names alone, and can be sent.

    :ivar board_nodes: the board's own nodes.
    :ivar inner: for the higher-order ops in that graph.
    """

    placements: Mapping[str, str]
    regions: tuple[tuple[str, ...], ...]
    board_nodes: tuple[str, ...]
    inner: InnerPlans = field(default_factory=dict)


#: Backend → the name of a higher-order node, which it runs if it is placed there → a plan for each
#: graph that the node calls. Such a node is a region by itself.
InnerPlans = Mapping[str, Mapping[str, tuple[InnerPlan, ...]]]


def regions_with(
    regions: Sequence[tuple[str, ...]],
    inner: InnerPlans,
    placements: Mapping[str, str],
    nodes: Mapping[str, Node],
) -> tuple[tuple[str, ...], ...]:
    """Planned regions, and one for each higher-order node whose graphs are planned.

    A region that has such a node among others is left to be cut as usual.
    """
    alone = [n for n in nodes if n in inner.get(placements.get(n, ""), {})]
    kept = [region for region in regions if not set(alone).intersection(region)]
    return (*kept, *((name, *items_of(nodes[name], nodes)) for name in alone))


def items_of(node: Node, among: Collection[str]) -> list[str]:
    """The names of the nodes that take items of a node's results."""
    return [n.name for n in node.users if n.target is operator.getitem and n.name in among]


def with_flat_results(graph: GraphModule) -> GraphModule:
    """A copy of a graph that returns a tuple, also where it returns one value by itself."""
    copy = copy_graph(graph)
    output = copy.graph.output_node()
    results = output.args[0]
    output.args = (tuple(results) if isinstance(results, list | tuple) else (results,),)
    return copy


def returns_one_value(graph: GraphModule) -> bool:
    """Whether a graph returns a value by itself, and no list of values."""
    return not isinstance(graph.graph.output_node().args[0], list | tuple)
