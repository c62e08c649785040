"""Whether rewrites of a whole graph keep its values.

A region's rewrites are judged with the region, which is held against what was captured. Those of a
whole graph come before there are regions, so all that follows would be held against what they made.
Therefore the part that was changed is run both ways, on the values of the call that is compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from fuseboard.contracts import Verdict
from fuseboard.errors import error_text
from fuseboard.ops.estimate import is_view, value_bytes
from fuseboard.profile.judge.reference import (
    Reference,
    make_reference,
    replayable,
    run_eager,
)
from fuseboard.profile.judge.replays import why_it_writes
from fuseboard.profile.judge.values import judge
from fuseboard.spare_memory import free_bytes
from fuseboard.torch_api.copies import graph_module, part_of_graph
from fuseboard.torch_api.symbols import in_the_example, why_unknown
from fuseboard.torch_api.tensor_classes import is_plain

#: What takes memory, in a message.
LEADING = "running what comes before them"
#: Of the free memory, what running a graph may take.
MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class Change:
    """The part of a graph that a rewrite changed.

    :ivar inputs: what both versions of the part read, nodes of the graph before.
    :ivar outputs: what nodes that were left as they were read of it, before.
    :ivar before: the part as it was.
    :ivar after: the part as it is, with as many inputs and outputs.
    """

    inputs: list[Node]
    outputs: list[Node]
    before: GraphModule
    after: GraphModule


def judge_rewrites(
    before: GraphModule, after: GraphModule, inputs: Sequence[Any] | None
) -> Verdict | str:
    """Run what differs between two graphs both ways; a text tells why that can't be judged.

    :param before: with the same inputs and outputs as ``after``; neither is changed.
    :param inputs: of both, real tensors and plain numbers. They aren't written to.
    """
    if problem := other_ends(before, after):
        return Verdict(False, problem)
    if (problem := why_it_writes(after)) and not why_it_writes(before):
        return Verdict(False, f"the rewritten graph isn't functional: {problem}")
    change = changed(before, after)
    if change is None:
        return Verdict(True)
    if inputs is None:
        return "the values of its inputs aren't known when it is compiled"
    if reason := replayable(before) or replayable(change.after):
        return reason
    first = before.graph.find_nodes(op="placeholder")
    leading = part_computing(before, first, change.inputs, first)
    if reason := why_no_room(LEADING, [leading]):
        return reason
    try:
        values = run_eager(leading, inputs)
        reference = make_reference(change.before, values)
    except Exception as error:  # eager raises it, too: the user's own, if it is in the call
        return error_text(error)
    try:
        results = run_eager(change.after, values)
    except Exception as error:  # an op may raise anything
        return Verdict(False, f"what was rewritten raises {error_text(error)}")
    return first_difference(change, reference, results)


def first_difference(change: Change, reference: Reference, results: Sequence[Any]) -> Verdict:
    """Whether what a changed part computes is right; else which of its results isn't."""
    for number, (node, result) in enumerate(zip(change.outputs, results, strict=True)):
        verdict = judge(reference.of([number]), [result])
        if not verdict.ok:
            problem = verdict.problem.removeprefix("output 0 ")
            where = f"what takes the place of {node.name} ({node.target})"
            return replace(verdict, problem=f"{where} {problem}")
    return Verdict(True)


def changed(before: GraphModule, after: GraphModule) -> Change | None:
    """What differs between a graph and a rewritten copy of it; None where nothing does.

    Nodes are known by their names. One that has the same op and constants as before is taken for
    unchanged: where it reads another node than before, the two must have equal values, and then
    its own is right.
    """
    same = _unchanged(before, after)
    differing: dict[tuple[Node, Node], None] = {}
    for new, old in list(same.items()):
        pairs = zip(_read_by(new), _read_by(old), strict=True)
        others = {(theirs, ours): None for ours, theirs in pairs if same.get(ours) is not theirs}
        if others and new.target is operator.getitem:
            del same[new]  # values are compared of items: those of tuples can't be
        else:
            differing |= others
    if not differing:
        return None
    old_outputs, new_outputs = map(list, zip(*differing, strict=True))
    computed = set(old_outputs)  # else there would be no float64 value of it
    given = {
        new: old
        for new, old in same.items()
        if _can_be_given(old) and _can_be_given(new) and old not in computed
    }
    twins = {old: new for new, old in given.items()}
    read = {
        *_inputs_of(old_outputs, twins),
        *(given[node] for node in _inputs_of(new_outputs, given)),
    }
    inputs = [node for node in before.graph.nodes if node in read]
    return Change(
        inputs,
        old_outputs,
        part_computing(before, inputs, old_outputs, twins),
        part_computing(after, [twins[node] for node in inputs], new_outputs, given),
    )


def example_values(graph: GraphModule, inputs: Sequence[Any]) -> list[Any] | None:
    """Values for the inputs of a joint or inference graph; None where they aren't known.

    :param inputs: the real ones, without the tangents, for which numbers are drawn: gradients are
        linear in them.
    """
    values: list[Any] = []
    real = iter(inputs)
    generator = torch.Generator().manual_seed(0)
    for node in graph.graph.find_nodes(op="placeholder"):
        known = node.meta.get("val")
        if why_unknown(known):
            return None
        if "tangents" in str(node.target):
            value = _drawn(known, generator) if isinstance(known, torch.Tensor) else None
        else:
            value = next(real, None)
            value = None if why_unknown(value) else in_the_example(value)
        if not _stands_for(value, known):
            return None
        values.append(value)
    return values if next(real, None) is None else None


def why_no_room(what: str, graphs: Sequence[GraphModule], beside: float = 0, runs: int = 1) -> str:
    """Why graphs shouldn't be run op by op for want of memory; "" if they may.

    A joint graph holds what eager would, also where a memory budget or checkpoints are to avoid it.

    :param what: is done by that, for the message.
    :param beside: bytes that a run takes on top of what the graphs hold.
    """
    values = (node.meta.get("val") for graph in graphs for node in graph.graph.nodes)
    device = next((value.device for value in values if isinstance(value, torch.Tensor)), None)
    free = None if device is None else free_bytes(device)
    needed = runs * (sum(map(peak_bytes, graphs)) + beside)
    if free is None or needed <= MEMORY_SHARE * free:
        return ""
    return f"{what} would take {needed / 2**20:.0f} MiB of the {free / 2**20:.0f} MiB that are free"


def peak_bytes(graph: GraphModule) -> float:
    """What a graph that is run op by op holds at the most, beside its inputs."""
    nodes = list(graph.graph.nodes)
    owner: dict[Node, Node] = {}
    last: dict[Node, int] = {}
    for number, node in enumerate(nodes):
        read = node.all_input_nodes
        shares = is_view(node) or node.target is operator.getitem
        owner[node] = owner[read[0]] if read and shares else node
        for one in (node, *read):
            last[owner[one]] = number
    ends: dict[int, list[Node]] = {}
    for node, number in last.items():
        ends.setdefault(number, []).append(node)
    held = peak = 0.0
    for number, node in enumerate(nodes):
        if owner[node] is node and node.op == "call_function":
            held += value_bytes(node.meta.get("val"))
            peak = max(peak, held)
        for gone in ends.get(number, ()):
            if gone.op == "call_function":
                held -= value_bytes(gone.meta.get("val"))
    return peak


def _stands_for(value: Any, known: Any) -> bool:
    """Whether a value may be that of an input; torch puts others in the place of a few."""
    if not isinstance(value, torch.Tensor):
        return isinstance(value, int | float) and not isinstance(known, torch.Tensor)
    return (
        is_plain(value)
        and isinstance(known, torch.Tensor)
        and value.dtype == known.dtype
        and list(value.shape) == [in_the_example(size) for size in known.shape]
    )


def _drawn(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers in a tensor of that shape."""
    shape = [int(in_the_example(size)) for size in like.shape]
    dtype = like.dtype if like.dtype.is_floating_point or like.dtype.is_complex else torch.float32
    drawn = torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
    return drawn.to(like.device, like.dtype)


# --- what differs ---------------------------------------------------------------------------------


def other_ends(before: GraphModule, after: GraphModule) -> str:
    """What is wrong with the inputs and outputs of a rewritten graph; "" if nothing is."""
    old, new = ([n.name for n in g.graph.find_nodes(op="placeholder")] for g in (before, after))
    if old != new:
        return f"the rewritten graph has the inputs {new}, not {old}"
    old_end, new_end = (_constants(g.graph.output_node()) for g in (before, after))
    return "" if old_end == new_end else "the rewritten graph has other outputs"


def _unchanged(before: GraphModule, after: GraphModule) -> dict[Node, Node]:
    """New node → the old one that does the same with what it reads, in the order of the new."""
    named = {node.name: node for node in before.graph.nodes}
    found = {}
    for node in after.graph.nodes:
        old = named.get(node.name)
        if old is not None and (old.op, old.target) == (node.op, node.target):
            if node.op == "get_attr":
                alike = _held(after, node) is _held(before, old)
            else:
                alike = _constants(node) == _constants(old)
            if alike:
                found[node] = old
    return found


def _held(graph: GraphModule, node: Node) -> Any:
    return operator.attrgetter(str(node.target))(graph)


#: Stands where a node's arguments have a node.
_SLOT: Any = object()


def _constants(node: Node) -> Any:
    arguments: Any = (node.args, node.kwargs)
    return map_aggregate(arguments, lambda item: _SLOT if isinstance(item, Node) else item)


def _read_by(node: Node) -> list[Node]:
    """The nodes among the arguments, in their order and as often as they are there."""
    read: list[Node] = []
    map_arg((node.args, node.kwargs), read.append)
    return read


def _can_be_given(node: Node) -> bool:
    """Whether its value can be an input of a part."""
    value = node.meta.get("val")
    number = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)
    return node.op != "get_attr" and (number or isinstance(value, torch.Tensor))


def _inputs_of(outputs: Sequence[Node], given: Collection[Node]) -> list[Node]:
    """The given nodes that outputs are computed from; those among them included."""
    return [node for node in _upstream(outputs, given) if node in given]


def _upstream(outputs: Sequence[Node], given: Collection[Node]) -> set[Node]:
    """All that outputs are computed from, up to what is given."""
    found: set[Node] = set()
    left = list(outputs)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            if node not in given:
                left.extend(node.all_input_nodes)
    return found


def part_computing(
    graph: GraphModule,
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    given: Collection[Node],
) -> GraphModule:
    """What computes the outputs from the inputs."""
    needed = _upstream(outputs, given)
    body = [node for node in graph.graph.nodes if node in needed and node not in given]
    part, _ = part_of_graph(inputs, body, outputs)
    return graph_module(graph, part, type(graph).__name__)
