"""Plans for the setting ``stages.plan``: they cut graphs into many regions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from fuseboard import BackendInfo, Claim, Decline, Plan


def first_claimer(
    graph: GraphModule, claims: dict[str, list[Claim | Decline]], backends: Sequence[BackendInfo]
) -> Plan:
    """The first backend in order that claims a node gets it, however little that is worth."""
    order = [info.name for info in backends]
    return _place(graph, claims, lambda able, number: min(able, key=order.index))


def alternate(
    graph: GraphModule, claims: dict[str, list[Claim | Decline]], backends: Sequence[BackendInfo]
) -> Plan:
    """The backends in turn, node by node, as far as they claim the node."""
    return _place(graph, claims, lambda able, number: able[number % len(able)])


def shuffled(
    graph: GraphModule, claims: dict[str, list[Claim | Decline]], backends: Sequence[BackendInfo]
) -> Plan:
    """A backend drawn for each node, the same in every process."""
    numbers = random.Random(len(graph.graph.nodes))
    return _place(graph, claims, lambda able, number: numbers.choice(able))


def _place(graph: GraphModule, claims: dict[str, list[Claim | Decline]], choose: Any) -> Plan:
    claimed = {
        name: {node for claim in answers if isinstance(claim, Claim) for node in claim.nodes}
        for name, answers in claims.items()
    }
    placements = {}
    for node in graph.graph.nodes:
        able = sorted(name for name, nodes in claimed.items() if node.name in nodes)
        if able:
            placements[node.name] = choose(able, len(placements))
    return Plan(placements, dict.fromkeys(placements, "a test placed it"))
