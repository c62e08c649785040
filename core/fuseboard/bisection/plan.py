"""A plan that gives one backend no more than so many ops, for the runs of a bisection."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule

from fuseboard.contracts import BackendInfo, Claim, Decline, Plan

#: Which of the ops that the first backend claims it gets, numbered through all graphs of the
#: process in the order in which they are planned. None: all of them.
allowed: range | None = None
#: The ops that it was offered so far: (name, target).
offered: list[tuple[str, str]] = []
#: The graphs in which it got some, and the names of those.
given: list[tuple[GraphModule, frozenset[str]]] = []


def some_nodes(
    graph: GraphModule, claims: dict[str, list[Claim | Decline]], backends: Sequence[BackendInfo]
) -> Plan:
    """What the first backend claims, as far as it is allowed; the rest runs in eager."""
    first, eager = backends[0].name, backends[-1].name
    claimed = [claim for claim in claims[first] if isinstance(claim, Claim)]
    names = {name for claim in claimed for name in claim.nodes}
    mine = set()
    for node in graph.graph.nodes:
        if node.name in names:
            if allowed is None or len(offered) in allowed:
                mine.add(node.name)
            offered.append((node.name, str(node.target)))
    for claim in claimed:
        if claim.together and not claim.nodes <= mine:
            mine -= claim.nodes
    if mine:
        given.append((graph, frozenset(mine)))
    computing = [n.name for n in graph.graph.nodes if n.op not in ("placeholder", "output")]
    placements = {name: first if name in mine else eager for name in computing}
    return Plan(placements, dict.fromkeys(placements, "a run of a bisection"))
