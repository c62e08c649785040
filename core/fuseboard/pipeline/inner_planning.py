"""Plans for the graphs that higher-order ops hold: each goes through the stages like any other.

A backend that takes no ``cond`` may still run what is in its branches. Where it would, it gets the
node as a region by itself, whose graphs are cut among it and eager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fuseboard.contracts import BackendInfo, Claim, Decline, GraphKind
from fuseboard.ops.effects import has_effects
from fuseboard.ops.inner_graphs import called_graphs, inner_nodes
from fuseboard.partition.board_nodes import board_nodes
from fuseboard.partition.inner_plans import (
    InnerPlan,
    InnerPlans,
    items_of,
    regions_with,
    with_flat_results,
)
from fuseboard.partition.plan import make_plan
from fuseboard.pipeline.staged_graph import Claims, placeable_nodes

#: (graph, the board's own nodes, backends) → their claims, and the plans for what it holds in turn.
AskClaims = Callable[
    [GraphModule, Mapping[Node, str], Sequence[BackendInfo]], tuple[Claims, InnerPlans]
]


@dataclass(frozen=True)
class InnerPlanner:
    """
    :ivar eager: what runs all that a backend doesn't claim.
    :ivar ask: asks for claims on a graph.
    """

    eager: BackendInfo
    kind: GraphKind
    min_region_us: float
    ask: AskClaims

    def plans(
        self, info: BackendInfo, nodes: Mapping[str, Node], not_these: Collection[str]
    ) -> dict[str, tuple[InnerPlan, ...]]:
        """For each higher-order node in whose graphs a backend would run something.

        :param nodes: of a graph, by name.
        :param not_these: what the backend runs as a whole, or may not have.
        """
        found = {}
        for name, node in nodes.items():
            graphs = [] if name in not_these else called_graphs(node)
            if not graphs or any(map(has_effects, inner_nodes(node))):
                continue
            plans = tuple(self._plan(info, inner.graph) for inner in graphs)
            if any(info.name in plan.placements.values() for plan in plans):
                found[name] = plans
        return found

    def _plan(self, info: BackendInfo, inner: GraphModule) -> InnerPlan:
        graph = with_flat_results(inner)
        kept = board_nodes(graph)
        backends = [info, self.eager]
        claims, plans = self.ask(graph, kept, backends)
        plan = make_plan(
            graph=graph,
            kind=self.kind,
            claims=claims,
            backends=backends,
            pins={},
            min_region_us=self.min_region_us,
            repeats="never",
        )
        nodes = {node.name: node for node in placeable_nodes(graph, kept)}
        regions = regions_with(plan.regions, plans, plan.placements, nodes)
        return InnerPlan(plan.placements, regions, tuple(node.name for node in kept), plans)


def with_inner(
    answers: Sequence[Claim | Decline],
    plans: Mapping[str, tuple[InnerPlan, ...]],
    nodes: Mapping[str, Node],
) -> list[Claim | Decline]:
    """A backend's answers, with a claim for each node whose graphs it gets, and its items."""
    claims = [frozenset({name, *items_of(nodes[name], nodes)}) for name in plans]
    now_claimed = frozenset().union(*claims)
    left = [one for one in answers if not (isinstance(one, Decline) and one.node in now_claimed)]
    return [*left, *(Claim(names, names) for names in claims)]
