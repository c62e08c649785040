"""Cut a region around the ops that a CUDA graph can't hold, so that the rest of it is recorded.

The parts alternate: what can be recorded, what can't, and so on, each op as early as its inputs
allow, so that there are few. It is the lowered region that is cut: what a backend decomposes an op
into may be recorded where the op can't.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fuseboard import Region
from fuseboard_cudagraphs._options import Options
from fuseboard_cudagraphs._partition import why_not
from fuseboard_cudagraphs._region import computes, why_not_region

Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Part:
    """A stretch of a region.

    :ivar region: with the part's graph, and its own static inputs.
    :ivar inputs: nodes of the whole region's graph, in the order of the part's placeholders.
    :ivar outputs: likewise, in the order of its outputs.
    :ivar recorded: whether it is to be.
    """

    region: Region
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    recorded: bool


@dataclass(frozen=True)
class Cuts:
    """How a region is cut.

    :ivar note: what people should know of it.
    """

    parts: tuple[Part, ...]
    note: str


def cut_region(region: Region, options: Options, device_type: str = "cuda") -> Cuts | str:
    """The parts of a region, in the order to run them; or why it isn't cut.

    "" where there is nothing to cut around.
    """
    calls = [node for node in region.graph.graph.nodes if node.op == "call_function"]
    (output,) = region.graph.graph.find_nodes(op="output")
    if any(node.op == "get_attr" for node in output.all_input_nodes):
        return "it returns a constant"
    if any(map(_writes, calls)):
        return "an op of it writes to an argument"
    reasons = {node: why_not(node, device_type, options.namespaces) for node in calls}
    around = {node: why for node, why in reasons.items() if why and not _is_part_of_result(node)}
    if not around:
        return ""
    unrecorded = {node for node, why in reasons.items() if why}
    while True:
        groups = _groups(calls, unrecorded)
        small = _too_small(groups, unrecorded, options.min_nodes)
        if not small:
            break
        unrecorded |= small
    parts = tuple(
        _part(region, number, group, group[0] not in unrecorded, options, device_type)
        for number, group in enumerate(groups)
    )
    if not any(part.recorded for part in parts):
        return (
            "cut around it, no part has as many ops that compute as plugins.cudagraphs.min_nodes, "
            f"{options.min_nodes}"
        )
    count = sum(not part.recorded for part in parts)
    if count > options.max_cuts:
        return f"it would take {count} cuts, plugins.cudagraphs.max_cuts is {options.max_cuts}"
    return Cuts(parts, _note(parts, around))


def run_parts(parts: Sequence[Part], calls: Sequence[Boxed], graph: GraphModule) -> Boxed:
    """One boxed function that calls the parts in order; values are let go after their last use.

    :param calls: of each part.
    :param graph: the whole region's.
    """
    slots = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    for part in parts:
        for node in part.outputs:
            slots[node] = len(slots)
    (output,) = graph.graph.find_nodes(op="output")
    results = [slots.get(value) if isinstance(value, Node) else None for value in output.args[0]]
    last = {slots[node]: i for i, part in enumerate(parts) for node in part.inputs}
    steps = []
    for i, (part, call) in enumerate(zip(parts, calls, strict=True)):
        used = [slots[node] for node in part.inputs]
        made = [slots[node] for node in part.outputs]
        ends = [slot for slot in {*used, *made} if last.get(slot, i) <= i and slot not in results]
        steps.append((call, used, made, ends))
    room = [None] * len(slots)

    def run(args: list[Any]) -> Sequence[Any]:
        values: list[Any] = [*args, *room[len(args) :]]
        args.clear()
        for call, used, made, ends in steps:
            given = [values[slot] for slot in used]
            for slot in ends:
                values[slot] = None
            for slot, value in zip(made, call(given), strict=True):
                values[slot] = value
        return [None if slot is None else values[slot] for slot in results]

    return run


# --- which ops go together ------------------------------------------------------------------------


def _groups(calls: Sequence[Node], unrecorded: Collection[Node]) -> list[list[Node]]:
    """The ops by part, in order: those of even levels are recorded, those of odd ones aren't.

    Draws of random numbers keep their order.
    """
    levels: dict[Node, int] = {}
    last_draw: Node | None = None
    for node in calls:
        odd = int(node in unrecorded)
        before = [used for used in node.all_input_nodes if used in levels]
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if draws and last_draw is not None:
            before.append(last_draw)
        levels[node] = max((levels[u] + (levels[u] % 2 != odd) for u in before), default=odd)
        if draws:
            last_draw = node
    found: dict[int, list[Node]] = {}
    for node in calls:
        found.setdefault(levels[node], []).append(node)
    return [found[level] for level in sorted(found)]


def _too_small(
    groups: Sequence[Sequence[Node]], unrecorded: Collection[Node], least: int
) -> set[Node]:
    """Ops of parts in which a recording saves no more launches than its copies take."""
    return {
        node
        for group in groups
        if group[0] not in unrecorded and sum(map(computes, group)) < least
        for node in group
    }


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_part_of_result(node: Node) -> bool:
    return node.target is operator.getitem


# --- the parts ------------------------------------------------------------------------------------


def _part(
    region: Region,
    number: int,
    nodes: Sequence[Node],
    wanted: bool,
    options: Options,
    device_type: str,
) -> Part:
    own = set(nodes)
    placeholders = region.graph.graph.find_nodes(op="placeholder")
    static = {placeholders[i] for i in region.static_inputs}
    read = dict.fromkeys(u for node in nodes for u in node.all_input_nodes if u not in own)
    sizes = [node for node in placeholders if isinstance(node.meta.get("val"), torch.SymInt)]
    inputs = [*(n for n in sizes if n not in read), *(n for n in read if n.op != "get_attr")]
    constants = [node for node in read if node.op == "get_attr"]
    outputs = [node for node in nodes if any(user not in own for user in node.users)]
    part = dataclasses.replace(
        region,
        name=f"{region.name}.part{number}",
        graph=_graph_of(region.graph, inputs, [*constants, *nodes], outputs),
        static_inputs=tuple(i for i, node in enumerate(inputs) if node in static),
        whole=False,
    )
    recorded = wanted and why_not_region(part, options, device_type) is None
    return Part(part, tuple(inputs), tuple(outputs), recorded)


def _graph_of(
    owner: GraphModule, inputs: Sequence[Node], body: Sequence[Node], outputs: Sequence[Node]
) -> GraphModule:
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in body:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return GraphModule(owner, graph)


def _note(parts: Sequence[Part], around: Mapping[Node, str]) -> str:
    recorded = sum(part.recorded for part in parts)
    ops = [sum(map(computes, part.region.graph.graph.nodes)) for part in parts]
    inside = sum(count for part, count in zip(parts, ops, strict=True) if part.recorded)
    why = "; ".join(dict.fromkeys(f"{node.target}: {reason}" for node, reason in around.items()))
    return (
        f"CUDA graphs: {inside} of {sum(ops)} ops in {recorded} "
        f"recording{'s' if recorded > 1 else ''}, cut around {why}"
    )
