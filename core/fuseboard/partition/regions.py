"""Cut a planned graph into regions: convex by construction, in linear time."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fuseboard.ops.effects import order_keepers
from fuseboard.ops.estimate import is_creation
from fuseboard.partition.places import Place
from fuseboard.partition.stages import stage_nodes
from fuseboard.partition.writes import Write
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.copies import graph_module, part_of_graph


@dataclass
class Cut:
    """A region before it is lowered: where it lies in the graph, and its graph as captured.

    :ivar inputs: nodes of the outer graph, in the order of the region's placeholders.
    :ivar outputs: nodes of the outer graph, in the order of the region's outputs.
    :ivar owner: the outer graph, which holds the constants.
    :ivar writes: whether it is one write to an input of the graph, and can be made in place.
    """

    place: Place
    owner: GraphModule
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    written: Graph | None = None
    writes: bool = False

    @functools.cached_property
    def graph(self) -> GraphModule:
        """The region's graph; of isomorphic regions one will do, so it is made when asked for."""
        assert self.written is not None, "filled in when it is cut"
        return graph_module(self.owner, self.written, "Region")

    @property
    def backend(self) -> str:
        return self.place.backend


def cut_regions(
    graph: GraphModule,
    placements: Mapping[str, str],
    kept: Collection[Node],
    regions: Sequence[Sequence[str]] = (),
    writes: Sequence[Write] = (),
) -> list[Cut]:
    """The regions of a plan in an order in which they can run.

    :param kept: the board's own nodes; regions that read them get copies.
    :param regions: the names of the nodes of each planned region, in the order to run them.
    :param writes: those that may be made in place, where they are regions by themselves.
    """
    kept = set(kept)
    position = {node: number for number, node in enumerate(graph.graph.nodes)}
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and n not in kept]
    places = stage_nodes(nodes, placements, regions)
    cuts: dict[Place, Cut] = {}
    for node in nodes:
        place = places[node]
        if place not in cuts:
            cuts[place] = Cut(place, graph)
        cuts[place].nodes.append(node)
    ordered = [cuts[key] for key in sorted(cuts)]
    for cut in ordered:
        if cut.place.planned >= 0:
            _follow(cut, regions[cut.place.planned])
    extraction = _Extraction(_symbol_placeholders(graph), kept, places, position)
    alone = {write.nodes for write in writes}
    for cut in ordered:
        extraction.fill(cut)
        cut.writes = tuple(cut.nodes) in alone
    return _late(ordered, position)


def _late(cuts: Sequence[Cut], position: Mapping[Node, int]) -> list[Cut]:
    """The cuts as near to the graph's own order as their inputs allow.

    What a backward computes again then runs right before it is read, as torch has ordered it, and
    not as soon as it could, when it would lie in memory until then. Draws of random numbers and
    effects keep their order.
    """
    makers = {node: number for number, cut in enumerate(cuts) for node in cut.outputs}
    ordered = order_keepers(node for cut in cuts for node in cut.nodes)
    waiting = [0] * len(cuts)
    followers: list[list[int]] = [[] for _ in cuts]
    last_ordered = -1
    for number, cut in enumerate(cuts):
        before = {makers[node] for node in cut.inputs if node in makers}
        if ordered and not ordered.isdisjoint(cut.nodes):
            if last_ordered >= 0:
                before.add(last_ordered)
            last_ordered = number
        waiting[number] = len(before)
        for maker in before:
            followers[maker].append(number)
    ends = [
        position[cut.nodes[-1]]
        if cut.place.planned < 0
        else max(map(position.__getitem__, cut.nodes))
        for cut in cuts
    ]
    ready = [(ends[number], number) for number, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    found = []
    while ready:
        _, number = heapq.heappop(ready)
        found.append(cuts[number])
        for follower in followers[number]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (ends[follower], follower))
    return found


def _follow(cut: Cut, names: Sequence[str]) -> None:
    """Put a planned region's nodes into the planned order; what joined it keeps its own place."""
    rank = {name: number for number, name in enumerate(names)}
    planned = iter(sorted((n for n in cut.nodes if n.name in rank), key=lambda n: rank[n.name]))
    cut.nodes = [next(planned) if node.name in rank else node for node in cut.nodes]


class _Extraction:
    """Makes the graphs of a graph's cuts."""

    def __init__(
        self,
        symbols: Mapping[Any, Node],
        kept: set[Node],
        places: Mapping[Node, Place],
        position: Mapping[Node, int],
    ) -> None:
        self.symbols = symbols
        self.kept = kept
        self.places = places
        self.position = position
        self._creations: dict[Node, bool] = {}

    def fill(self, cut: Cut) -> None:
        """Fill in a cut's inputs, outputs and graph.

        A planned region's inputs come in the order of first use, so that isomorphic ones agree.
        """
        body, inputs, attributes = self._body(cut)
        for node in [*body, *inputs] if self.symbols else ():
            for symbol in _symbols_of(node):
                if symbol in self.symbols:
                    inputs[self.symbols[symbol]] = None
        cut.inputs = list(inputs)
        if cut.place.planned < 0:
            cut.inputs.sort(key=self.position.__getitem__)
        cut.outputs = [node for node in cut.nodes if self._read_outside(node, node, cut.place)]
        cut.written, placeholders = part_of_graph(cut.inputs, [*attributes, *body], cut.outputs)
        for placeholder in placeholders:  # bound where it is made, not here
            placeholder.meta.pop("unbacked_bindings", None)

    def _body(self, cut: Cut) -> tuple[dict[Node, None], dict[Node, None], dict[Node, None]]:
        """The cut's nodes and what they read from outside: (nodes, inputs, attributes).

        Right before each node come copies of what it reads of the board's.
        """
        own = set(cut.nodes)
        body: dict[Node, None] = {}
        inputs: dict[Node, None] = {}
        attributes: dict[Node, None] = {}
        pending: list[Node] = []
        for first in cut.nodes:
            pending.append(first)
            while pending:
                node = pending[-1]
                read = [used for used in node.all_input_nodes if used not in own]
                needed = [u for u in read if u not in body and self._copied(u, cut.place)]
                if needed:
                    pending.extend(needed)
                    continue
                body[pending.pop()] = None
                for used in read:
                    if used not in body:
                        (attributes if used.op == "get_attr" else inputs)[used] = None
        return body, inputs, attributes

    def _copied(self, node: Node, place: Place) -> bool:
        """Whether a region that reads this node gets a copy of it instead of its value."""
        home = self.places.get(node)
        if home is None:
            return node in self.kept
        return home.backend == place.backend and self._is_creation(node)

    def _is_creation(self, node: Node) -> bool:
        known = self._creations.get(node)
        if known is None:
            known = self._creations[node] = is_creation(node)
        return known

    def _read_outside(self, value: Node, node: Node, place: Place) -> bool:
        """Whether a value, or what the board makes of it in ``node``, is needed out of reach."""
        for user in node.users:
            home = self.places.get(user)
            if home == place:
                continue
            if user in self.kept:
                if self._read_outside(value, user, place):
                    return True
            elif home is None or not self._copied(value, home):
                return True
        return False


def _symbol_placeholders(graph: GraphModule) -> dict[Any, Node]:
    found: dict[Any, Node] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        symbol = torch_internals.plain_symbol(node.meta.get("val"))
        if symbol is not None:
            found.setdefault(symbol, node)
    return found


def _symbols_of(node: Node) -> list[Any]:
    """The symbols in a node's value, in an order that doesn't change between processes."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    found = {
        symbol
        for item in values
        if isinstance(item, torch.Tensor | torch.SymInt)
        for symbol in torch_internals.free_symbols(item)
    }
    return sorted(found, key=str)
