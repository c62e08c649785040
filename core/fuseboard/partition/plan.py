"""The plan: which backend runs each node. Policy ``priority``.

Each stretch goes to the first backend that claims it and does a good part of its work natively.
A plan that falls into fragments loses to the first backend that could have taken everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import GraphModule, Node

from fuseboard.contracts import BackendInfo, Claim, Decline, GraphKind, Plan, Repeats
from fuseboard.errors import ContractError
from fuseboard.partition.estimate import estimate_us
from fuseboard.partition.regions import stage_nodes

#: A claim whose native nodes do less of its estimated work than this goes to a later backend
#: that runs natively what the claim would only carry along.
MIN_NATIVE_SHARE = 0.6

#: A plan of more regions than this loses to a single backend that claims everything.
MAX_REGIONS = 4


def plan_by_priority(
    graph: GraphModule,
    kind: GraphKind,
    claims: dict[str, list[Claim | Decline]],
    backends: Sequence[BackendInfo],
    pins: Mapping[str, str],
    min_region_us: float,
    merge_regions: bool,
    repeats: Repeats,
) -> Plan:
    """Assign every node; deterministic, from the arguments alone."""
    order = [info.name for info in backends]
    everything = {n for c in claims[order[-1]] if isinstance(c, Claim) for n in c.nodes}
    nodes = [node for node in graph.graph.nodes if node.name in everything]
    work = {node.name: estimate_us(node) for node in nodes}
    accepted = {
        name: _accepted(name, order[position + 1 :], claims, work)
        for position, name in enumerate(order)
    }
    chosen = {
        node.name: next(name for name in order if node.name in accepted[name]) for node in nodes
    }
    placements = _without_crumbs(nodes, chosen, work, order, min_region_us)
    regions = len(set(stage_nodes(nodes, placements).values()))
    if regions > MAX_REGIONS:
        whole = next(name for name in order if _claims_all(claims[name], nodes))
        if whole != order[-1]:
            reason = f"{whole} can run all of it; the plan by priority had {regions} regions"
            return Plan({n.name: whole for n in nodes}, {n.name: reason for n in nodes})
    return Plan(placements, _reasons(nodes, placements, claims, order))


def _accepted(
    name: str,
    later: Sequence[str],
    claims: Mapping[str, list[Claim | Decline]],
    work: Mapping[str, float],
) -> frozenset[str]:
    """The nodes of a backend's claims that are worth it."""
    rivals = later[:-1]
    taken: set[str] = set()
    for claim in claims[name]:
        if not isinstance(claim, Claim):
            continue
        total = sum(work.get(node, 0.0) for node in claim.nodes)
        native = sum(work.get(node, 0.0) for node in claim.native)
        carried = claim.nodes - claim.native
        elsewhere = {node for rival in rivals for node in _native(claims[rival])}
        if carried & elsewhere and native < MIN_NATIVE_SHARE * total:
            continue
        taken |= claim.nodes
    return frozenset(taken)


def _native(answers: Sequence[Claim | Decline]) -> set[str]:
    return {name for claim in answers if isinstance(claim, Claim) for name in claim.native}


def _claims_all(answers: Sequence[Claim | Decline], nodes: Sequence[Node]) -> bool:
    claimed = {name for claim in answers if isinstance(claim, Claim) for name in claim.nodes}
    return all(node.name in claimed for node in nodes)


def _without_crumbs(
    nodes: Sequence[Node],
    chosen: dict[str, str],
    work: Mapping[str, float],
    order: Sequence[str],
    min_region_us: float,
) -> dict[str, str]:
    """Leave to eager what is too little for starting a second compiler."""
    totals: dict[str, float] = {}
    for name, backend in chosen.items():
        totals[backend] = totals.get(backend, 0.0) + work[name]
    main = max(totals, key=lambda backend: totals[backend], default="")
    small = {b for b in order[:-1] if b != main and totals.get(b, 0.0) < min_region_us}
    return {name: order[-1] if b in small else b for name, b in chosen.items()}


def _reasons(
    nodes: Sequence[Node],
    placements: Mapping[str, str],
    claims: Mapping[str, list[Claim | Decline]],
    order: Sequence[str],
) -> dict[str, str]:
    """Why each node is where it is."""
    reasons: dict[str, str] = {}
    native = {name: _native(claims[name]) for name in order}
    for node in nodes:
        backend = placements[node.name]
        if backend == order[0] and node.name in native[backend]:
            reasons[node.name] = f"{backend} comes first and runs it natively"
        elif node.name in native[backend] and backend != order[-1]:
            reasons[node.name] = f"first in order that runs it natively: {backend}"
        elif backend != order[-1]:
            reasons[node.name] = f"carried along in a stretch of {backend}"
        else:
            reasons[node.name] = "no other backend took it"
    return reasons


def check_plan(plan: Plan, claims: Mapping[str, list[Claim | Decline]], answered_by: str) -> None:
    """Hold a plan against the claims, before anything is lowered.

    :raises ContractError: a node is missing, or placed on a backend that didn't claim it.
    """

    def broken(problem: str) -> ContractError:
        return ContractError(answered_by, "fuseboard_plan", problem)

    claimed = {
        name: {node for claim in answers if isinstance(claim, Claim) for node in claim.nodes}
        for name, answers in claims.items()
    }
    names = set().union(*claimed.values())
    missing = sorted(names - plan.placements.keys())
    if missing:
        raise broken(f"{len(missing)} nodes have no placement, among them {missing[0]!r}")
    for name in sorted(names):
        backend = plan.placements[name]
        if backend not in claimed:
            known = ", ".join(sorted(claimed))
            raise broken(f"node {name!r} is placed on {backend!r}; the backends are {known}")
        if name not in claimed[backend]:
            raise broken(f"node {name!r} is placed on {backend!r}, which didn't claim it")
        if name not in plan.reasons:
            raise broken(f"node {name!r} has a placement and no reason")
