"""The plan: which backend runs each node. Policy ``priority``.

Each stretch goes to the first backend that claims it and does a good part of its work natively.
A plan that falls into fragments loses to the first backend that could have taken everything. What
the user pinned is where the pins say, and counts against nobody.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from torch.fx import GraphModule, Node

from fuseboard.contracts import BackendInfo, Claim, Decline, GraphKind, Plan, Repeats
from fuseboard.hookspecs import hookimpl
from fuseboard.ops.estimate import estimates_us
from fuseboard.partition.claims import claimed_names
from fuseboard.partition.repeats import repeated_regions
from fuseboard.partition.stages import contraction_cycle, stage_nodes
from fuseboard.partition.views import pull_views

#: A claim whose native nodes do less of its estimated work than this goes to a later backend
#: that runs natively what the claim would only carry along.
MIN_NATIVE_SHARE = 0.6

#: A plan of more regions than this loses to a single backend that claims everything.
MAX_REGIONS = 4


@hookimpl(specname="fuseboard_plan")
def make_plan(
    graph: GraphModule,
    kind: GraphKind,
    claims: dict[str, list[Claim | Decline]],
    backends: Sequence[BackendInfo],
    pins: Mapping[str, str],
    min_region_us: float,
    repeats: Repeats,
) -> Plan:
    """The first backend in order that gains by a node gets it.

    It is deterministic, and decides from its arguments alone: the same on every rank. So it is
    under each policy: by ``measured`` the board asks for one plan for each set of backends, and
    measures them.
    """
    order = [info.name for info in backends]
    everything = claimed_names(claims[order[-1]])
    nodes = [node for node in graph.graph.nodes if node.name in everything]
    work = {node.name: us for node, us in estimates_us(nodes).items()}
    names = [node.name for node in nodes]
    worthwhile = {
        name: _worthwhile(name, order[position + 1 :], claims, work)
        for position, name in enumerate(order)
    }
    chosen = _choose(nodes, worthwhile, order, pins)
    chosen = pull_views(nodes, chosen, claims, pins)
    placements = _without_crumbs(chosen, work, order, min_region_us, pins)
    whole = next(name for name in order if _takes_rest(name, claims[name], names, pins))
    regions = len(set(stage_nodes(nodes, placements).values())) if whole != order[-1] else 0
    if regions > MAX_REGIONS:
        all_there = {name: pins.get(name, whole) for name in names}
        joined = split_claims(nodes, all_there, claims)
        if not (joined and contraction_cycle(nodes, joined)):
            reason = f"{whole} can run all of it; the plan by priority had {regions} regions"
            placements = all_there
            reasons = {n: f"pinned to {pins[n]}" if n in pins else reason for n in names}
            return _with_regions(nodes, placements, reasons, claims, backends, repeats)
    reasons = _reasons(nodes, placements, claims, order, pins)
    return _with_regions(nodes, placements, reasons, claims, backends, repeats)


def _with_regions(
    nodes: Sequence[Node],
    placements: dict[str, str],
    reasons: dict[str, str],
    claims: Mapping[str, list[Claim | Decline]],
    backends: Sequence[BackendInfo],
    repeats: Repeats,
) -> Plan:
    """The plan with the regions that were claimed as such, and those of repeated blocks."""
    joined = split_claims(nodes, placements, claims)
    inside = {name for names in joined for name in names}
    free = [node for node in nodes if node.name not in inside]
    blocks, notes = repeated_regions(free, placements, backends, repeats)
    regions = (*joined, *(tuple(node.name for node in block) for block in blocks))
    torn = blocks and split_claims(nodes, placements, claims, regions)
    if torn or (joined and blocks and contraction_cycle(nodes, regions)):
        notes = ["repeated blocks aren't cut out: claims that must be taken whole lie across them"]
        return Plan(placements, reasons, joined, tuple(notes))
    return Plan(placements, reasons, regions, tuple(notes))


def _worthwhile(
    name: str,
    later: Sequence[str],
    claims: Mapping[str, list[Claim | Decline]],
    work: Mapping[str, float],
) -> list[Claim]:
    """A backend's claims, less those that carry what a later backend would run natively."""
    native = [_native(claims[rival]) for rival in later[:-1]]
    found = []
    for claim in claims[name]:
        if isinstance(claim, Claim):
            carried = claim.nodes - claim.native
            if all(carried.isdisjoint(others) for others in native) or (
                _total(work, claim.native) >= MIN_NATIVE_SHARE * _total(work, claim.nodes)
            ):
                found.append(claim)
    return found


def _total(work: Mapping[str, float], names: Collection[str]) -> float:
    """The sum, the same in whatever order sets hand out their items."""
    return math.fsum(work.get(name, 0.0) for name in names)


def _choose(
    nodes: Sequence[Node],
    claims: Mapping[str, Sequence[Claim]],
    order: Sequence[str],
    pins: Mapping[str, str],
) -> dict[str, str]:
    """Each node's backend: the pinned one, else the first that claims it.

    Nodes that are claimed together go together: where one of them is gone, or the claims that were
    taken so can't be regions side by side, all of them are left to others.
    """
    refused: list[Claim] = []
    while True:
        chosen = dict(pins)
        taken: list[Claim] = []
        for backend in order:
            for claim in sorted(claims[backend], key=lambda claim: not claim.together):
                free = claim.nodes - chosen.keys()
                if claim.together and all(chosen.get(n) == backend for n in claim.nodes):
                    taken.append(claim)  # all of it is pinned
                elif not claim.together:
                    chosen.update(dict.fromkeys(free, backend))
                elif len(free) == len(claim.nodes) and claim not in refused:
                    chosen.update(dict.fromkeys(free, backend))
                    taken.append(claim)
        groups = [sorted(claim.nodes) for claim in taken]
        if not groups or not contraction_cycle(nodes, groups):
            return {node.name: chosen[node.name] for node in nodes}
        refused.append(_first_in_the_way(nodes, taken))


def _first_in_the_way(nodes: Sequence[Node], taken: Sequence[Claim]) -> Claim:
    """The first claim that can't be a region beside those before it."""
    groups: list[list[str]] = []
    for claim in taken:
        groups.append(sorted(claim.nodes))
        if contraction_cycle(nodes, groups):
            return claim
    raise AssertionError("together they make a cycle")


def split_claims(
    nodes: Sequence[Node],
    placements: Mapping[str, str],
    claims: Mapping[str, Sequence[Claim | Decline]],
    regions: Sequence[Sequence[str]] = (),
) -> tuple[tuple[str, ...], ...]:
    """The nodes of each claim that was taken as one and that these regions would cut in two.

    Without planned regions, two nodes of a claim come apart where one of them waits for another
    backend and the other doesn't.
    """
    together = [
        (backend, claim.nodes)
        for backend, answers in claims.items()
        for claim in answers
        if isinstance(claim, Claim) and claim.together
    ]
    if not together:
        return ()
    staged = stage_nodes(nodes, placements, regions)
    places = {node.name: place for node, place in staged.items()}
    position = {node.name: number for number, node in enumerate(nodes)}
    found: dict[tuple[str, ...], None] = {}
    for backend, names in together:
        if all(placements[name] == backend for name in names):
            if len({places[name] for name in names}) > 1:
                found[tuple(sorted(names, key=position.__getitem__))] = None
    return tuple(found)


def _native(answers: Sequence[Claim | Decline]) -> set[str]:
    return set().union(*(claim.native for claim in answers if isinstance(claim, Claim)))


def _takes_rest(
    backend: str, answers: Sequence[Claim | Decline], names: Sequence[str], pins: Mapping[str, str]
) -> bool:
    """Whether a backend claims whatever isn't pinned elsewhere."""
    own = {name for name in names if pins.get(name, backend) == backend}
    claimed: set[str] = set()
    for claim in answers:
        if isinstance(claim, Claim) and (not claim.together or claim.nodes <= own):
            claimed |= claim.nodes
    return own <= claimed


def _without_crumbs(
    chosen: Mapping[str, str],
    work: Mapping[str, float],
    order: Sequence[str],
    min_region_us: float,
    pins: Mapping[str, str],
) -> dict[str, str]:
    """Leave to eager what is too little for starting a second compiler, and isn't pinned."""
    totals: dict[str, float] = {}
    for name, backend in chosen.items():
        if name not in pins:
            totals[backend] = totals.get(backend, 0.0) + work[name]
    main = max(totals, key=lambda backend: totals[backend], default="")
    small = {b for b in order[:-1] if b != main and totals.get(b, 0.0) < min_region_us}
    return {
        name: order[-1] if backend in small and name not in pins else backend
        for name, backend in chosen.items()
    }


def _reasons(
    nodes: Sequence[Node],
    placements: Mapping[str, str],
    claims: Mapping[str, list[Claim | Decline]],
    order: Sequence[str],
    pins: Mapping[str, str],
) -> dict[str, str]:
    """Why each node is where it is."""
    reasons: dict[str, str] = {}
    native = {name: _native(claims[name]) for name in order}
    for node in nodes:
        backend = placements[node.name]
        if node.name in pins:
            reasons[node.name] = f"pinned to {backend}"
        elif node.name in native[backend] and backend == order[0]:
            reasons[node.name] = f"{backend} comes first and runs it natively"
        elif node.name in native[backend] and backend != order[-1]:
            reasons[node.name] = f"first in order that runs it natively: {backend}"
        elif backend != order[-1]:
            reasons[node.name] = f"carried along in a stretch of {backend}"
        else:
            reasons[node.name] = "no other backend took it"
    return reasons
