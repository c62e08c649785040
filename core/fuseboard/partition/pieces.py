"""A graph in pieces, each so small that one backend is best at all of it."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fuseboard.contracts import Claim, Decline, Plan
from fuseboard.partition.estimate import is_contraction, is_view
from fuseboard.partition.regions import Cut, cut_regions


@dataclass(frozen=True)
class Piece:
    """A stretch of a graph.

    :ivar cut: its place names no backend.
    :ivar able: the backends that may run all of it, in order of preference.
    """

    cut: Cut
    able: tuple[str, ...]


def cut_pieces(
    graph: GraphModule,
    plans: Mapping[str, Plan],
    claims: Mapping[str, Sequence[Claim | Decline]],
    kept: Collection[Node],
) -> list[Piece]:
    """The pieces of a graph in the order to run them.

    A piece ends where the next matrix product, convolution or attention begins, and where the
    backends differ that take the nodes. So it is a stretch of the graph's own order, and none
    depends on itself through another one.

    :param plans: backend → the plan for it and eager alone, in order of preference. What a backend
        takes only as a whole it isn't asked for here.
    """
    first = next(iter(plans.values())).placements
    claimed, torn = _names(claims, together=False), _names(claims, together=True)
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and n not in kept]
    able: list[tuple[str, ...]] = []
    groups: list[list[Node]] = []
    home: dict[Node, int] = {}
    contracts = False  # the last group
    for node, waiting in _with_what_waited(nodes):
        if node.target is operator.getitem and node.args[0] in home:
            home[node] = home[node.args[0]]  # type: ignore[index]
            groups[home[node]].append(node)
            continue
        together = [*waiting, node]
        backends = tuple(
            backend
            for backend, plan in plans.items()
            if plan.placements.get(node.name) == backend
            and torn[backend].isdisjoint(one.name for one in together)
            and all(one.name in claimed[backend] for one in waiting)
        )
        backends = backends or (first[node.name],)
        starts = is_contraction(node)
        if not groups or backends != able[-1] or (starts and contracts):
            groups.append([])
            able.append(backends)
            contracts = False
        contracts = contracts or starts
        home.update(dict.fromkeys(together, len(groups) - 1))
        groups[-1].extend(together)
    placements = {node.name: "" for node in nodes}
    regions = [tuple(node.name for node in group) for group in groups]
    cuts = cut_regions(graph, placements, kept, regions)
    return [Piece(cut, able[cut.place.planned]) for cut in cuts]


def _with_what_waited(nodes: Sequence[Node]) -> Iterator[tuple[Node, list[Node]]]:
    """Each node with the views that come right before it: those of the graph's inputs.

    A view of a weight waits for what reads it: between two pieces it would be copied.
    """
    placed = set(nodes)
    waiting: dict[Node, None] = {}
    for node in nodes:
        inner = [used for used in node.all_input_nodes if used in placed]
        several = isinstance(node.meta.get("val"), list | tuple)  # their items stay beside them
        if is_view(node) and not several and all(used in waiting for used in inner):
            waiting[node] = None
            continue
        due: dict[Node, None] = {}
        pending = [used for used in inner if used in waiting]
        while pending:
            view = pending.pop()
            due[view] = None
            pending.extend(used for used in view.all_input_nodes if used in waiting)
        ready = [view for view in waiting if view in due]
        for view in ready:
            del waiting[view]
        yield node, ready
    for node in waiting:
        yield node, []


def _names(claims: Mapping[str, Sequence[Claim | Decline]], together: bool) -> dict[str, set[str]]:
    """Backend → the nodes of its claims; or only of those that it takes as a whole."""
    return {
        backend: {
            name
            for claim in answers
            if isinstance(claim, Claim) and (claim.together or not together)
            for name in claim.nodes
        }
        for backend, answers in claims.items()
    }
