"""Which nodes may share a region: stages, in linear time, so that no region depends on itself.

Nodes get a *place*: a stage, their backend, and the planned region that they belong to if any. A
node's stage is as late as its latest input's, and one later where that input is at another place.
Edges between regions then always lead to a later stage, so no region can depend on itself through
another one. A planned region moves through the stages as one node.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch.fx import Node

from fuseboard.ops.effects import order_keepers
from fuseboard.ops.estimate import is_creation
from fuseboard.partition.places import Place


def stage_nodes(
    nodes: Sequence[Node],
    placements: Mapping[str, str],
    regions: Sequence[Sequence[str]] = (),
) -> dict[Node, Place]:
    """The place of each placed node.

    Draws of random numbers and ops with effects keep their order: each counts as an input of
    the next one.

    :param regions: the names of the nodes of each planned region.
    """
    placed = [node for node in nodes if node.name in placements]
    backends = {placements[node.name] for node in placed}
    if len(backends) == 1 and not regions:  # nothing waits for another backend
        return dict.fromkeys(placed, Place(0, backends.pop()))
    units = _units(placed, regions)
    ordered = order_keepers(placed)
    reads = _reads(placed, ordered)
    places: dict[Node, Place] = {}
    for unit in _ordered(placed, units, reads):
        place = _earliest(unit, placements[unit[0].name], max(units[unit[0]], -1), reads, places)
        for node in unit:
            places[node] = place
    _sink(placed, ordered, reads, places)
    _join_readers(placed, places)
    return places


def _earliest(
    unit: Sequence[Node],
    backend: str,
    planned: int,
    reads: Mapping[Node, Sequence[Node]],
    places: Mapping[Node, Place],
) -> Place:
    """The place of nodes that move together, in the first stage behind all that they read."""
    if len(unit) == 1:
        read: Iterable[Node] = reads[unit[0]]
    else:
        inside = set(unit)
        read = [used for node in unit for used in reads[node] if used not in inside]
    stage = 0
    for used in read:
        earliest, other, group = places[used]
        if earliest >= stage:
            together = planned < 0 and group < 0 and other == backend
            stage = earliest if together else earliest + 1
    return Place(stage, backend, planned)


def contraction_cycle(nodes: Sequence[Node], regions: Sequence[Sequence[str]]) -> list[str]:
    """Names of nodes that would depend on themselves, were each region a single node.

    Empty where the regions can be cut. ``getitem`` follows what it takes an item of.
    """
    units = _units(nodes, regions)
    reads = _reads(nodes, order_keepers(nodes))
    done = {node for unit in _ordered(nodes, units, reads) for node in unit}
    return [node.name for node in nodes if node not in done]


# --- units: what moves through the stages together ----------------------------------------------


def _units(nodes: Sequence[Node], regions: Sequence[Sequence[str]]) -> dict[Node, int]:
    """The unit of each node: its planned region's number, else a negative one of its own."""
    planned = {name: number for number, names in enumerate(regions) for name in names}
    units: dict[Node, int] = {}
    for place, node in enumerate(nodes):
        if node.target is operator.getitem and node.args[0] in units:
            units[node] = units[node.args[0]]  # type: ignore[index]
        else:
            units[node] = planned.get(node.name, -2 - place)
    return units


def _reads(nodes: Sequence[Node], ordered: Collection[Node]) -> dict[Node, list[Node]]:
    """What each node must come after: the placed nodes that it reads, and the draw before it.

    :param ordered: the nodes that keep their order.
    """
    reads: dict[Node, list[Node]] = {}
    last_ordered: Node | None = None
    for node in nodes:
        found = [used for used in node.all_input_nodes if used.op == "call_function"]
        if any(used not in reads for used in found):  # the board's own among them
            found = _placed_inputs(node, reads)
        if node in ordered:
            if last_ordered is not None:
                found.append(last_ordered)
            last_ordered = node
        reads[node] = found
    return reads


def _placed_inputs(node: Node, placed: Mapping[Node, object]) -> list[Node]:
    """The placed nodes that a node reads, looking through the board's own nodes."""
    found: list[Node] = []
    for used in node.all_input_nodes:
        if used in placed:
            found.append(used)
        elif used.op == "call_function":
            found.extend(_placed_inputs(used, placed))
    return found


def _ordered(
    nodes: Sequence[Node], units: Mapping[Node, int], reads: Mapping[Node, Sequence[Node]]
) -> Iterable[list[Node]]:
    """The units in an order in which they can run; without those on a cycle and behind it."""
    members: dict[int, list[Node]] = {}
    for node in nodes:
        members.setdefault(units[node], []).append(node)
    if all(unit < 0 for unit in members):
        return members.values()  # nodes in graph order, and what they made
    waiting = dict.fromkeys(members, 0)
    followers: dict[int, list[int]] = {}
    for node in nodes:
        for used in reads[node]:
            if units[used] != units[node]:
                waiting[units[node]] += 1
                followers.setdefault(units[used], []).append(units[node])
    rank = {unit: number for number, unit in enumerate(members)}
    ready = [(rank[unit], unit) for unit, count in waiting.items() if not count]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, unit = heapq.heappop(ready)
        ordered.append(members[unit])
        for follower in followers.get(unit, ()):
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (rank[follower], follower))
    return ordered


# --- moving what is free to move ----------------------------------------------------------------


def _sink(
    nodes: Sequence[Node],
    ordered: Collection[Node],
    reads: Mapping[Node, Sequence[Node]],
    places: dict[Node, Place],
) -> None:
    """Move nodes to the region of their first reader, where edges still lead to later stages.

    A weight's transpose or cast then lies in the region that uses it, where it can be hoisted
    with it, and repeated blocks look alike. What keeps its order, and what depends on such a
    node, stays where it is.

    :param ordered: the nodes that keep their order.
    """
    fixed = set(ordered)
    readers: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node in nodes:
        for used in reads[node]:
            readers[used].append(node)
            if used in fixed:
                fixed.add(node)
    for node in reversed(nodes):
        users = readers[node]
        own = places[node]
        if not users or own.planned >= 0 or node in fixed or node.target is operator.getitem:
            continue
        homes = {places[user] for user in users}
        if homes == {own} or any(user.target is operator.getitem for user in users):
            continue
        stage = min(
            home.stage if home.backend == own.backend and home.planned < 0 else home.stage - 1
            for home in homes
        )
        target = Place(stage, own.backend)
        if target in homes:
            places[node] = target


def _join_readers(nodes: Sequence[Node], places: dict[Node, Place]) -> None:
    """Move tensors made of constants into the first region that reads them; others get copies."""
    for node in reversed(nodes):
        if not is_creation(node) or places[node].planned >= 0:
            continue
        users = [places[user] for user in node.users if user in places]
        alone = all(user in places or user.op == "output" for user in node.users)
        if users and alone and all(user.backend == places[node].backend for user in users):
            places[node] = min(users)
