"""Cut a planned graph into regions: convex by construction, in linear time.

Nodes get a *stage*: as late as their latest input's, and one later where that input is on
another backend. Edges between regions (a backend at a stage) then always lead to a later stage,
so no region can depend on itself through another one.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fuseboard import torch_internals
from fuseboard.lower.codegen import target_name


@dataclass
class Cut:
    """A region before it is lowered: where it lies in the graph, and its graph as captured.

    :ivar inputs: nodes of the outer graph, in the order of the region's placeholders.
    :ivar outputs: nodes of the outer graph, in the order of the region's outputs.
    """

    backend: str
    stage: int
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    graph: GraphModule | None = None


def stage_nodes(
    nodes: Sequence[Node], placements: Mapping[str, str]
) -> dict[Node, tuple[int, str]]:
    """(stage, backend) for each placed node.

    Draws of random numbers and ops with effects keep their order: each counts as an input of
    the next one.
    """
    stages: dict[Node, tuple[int, str]] = {}
    last_ordered: Node | None = None
    for node in nodes:
        if node.name not in placements:
            continue
        if node.target is operator.getitem and node.args[0] in stages:
            stages[node] = stages[node.args[0]]  # type: ignore[index]
            continue
        backend = placements[node.name]
        before = list(_placed_inputs(node, stages))
        if keeps_order(node):
            if last_ordered is not None:
                before.append(last_ordered)
            last_ordered = node
        stage = 0
        for used in before:
            earlier, other = stages[used]
            stage = max(stage, earlier if other == backend else earlier + 1)
        stages[node] = (stage, backend)
    _sink(nodes, stages)
    return stages


def _sink(nodes: Sequence[Node], stages: dict[Node, tuple[int, str]]) -> None:
    """Move what depends on the graph's inputs alone to the stage of its first reader.

    A weight's transpose or cast then lies in the region that uses it, where it can be hoisted
    with it, and repeated blocks look alike. Edges still lead to the same region or a later stage.
    """
    rooted: set[Node] = set()
    readers: dict[Node, list[Node]] = {}
    for node in nodes:
        if node in stages:
            used = _placed_inputs(node, stages)
            for other in used:
                readers.setdefault(other, []).append(node)
            if not keeps_order(node) and all(other in rooted for other in used):
                rooted.add(node)
    for node in reversed(nodes):
        users = readers.get(node, ())
        if node not in rooted or not users or any(u.target is operator.getitem for u in users):
            continue
        if node.target is not operator.getitem:
            backend = stages[node][1]
            latest = min(
                stage if other == backend else stage - 1
                for stage, other in (stages[user] for user in users)
            )
            stages[node] = (latest, backend)


def _placed_inputs(node: Node, stages: Mapping[Node, Any]) -> list[Node]:
    """The placed nodes that a node reads, looking through the board's own nodes."""
    found: list[Node] = []
    for used in node.all_input_nodes:
        if used in stages:
            found.append(used)
        elif used.op == "call_function":
            found.extend(_placed_inputs(used, stages))
    return found


def keeps_order(node: Node) -> bool:
    """Whether a node draws random numbers or has effects, so that its order matters."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags or bool(node.is_impure())
    return isinstance(target, torch._ops.HigherOrderOperator)


def cut_regions(
    graph: GraphModule, placements: Mapping[str, str], kept: Collection[Node]
) -> list[Cut]:
    """The regions of a plan in an order in which they can run.

    :param kept: the board's own nodes; regions that read them get copies.
    """
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and n not in kept]
    stages = stage_nodes(nodes, placements)
    cuts: dict[tuple[int, str], Cut] = {}
    for node in nodes:
        stage, backend = stages[node]
        cuts.setdefault((stage, backend), Cut(backend, stage)).nodes.append(node)
    ordered = [cuts[key] for key in sorted(cuts)]
    symbols = _symbol_placeholders(graph)
    for cut in ordered:
        _extract(graph, cut, set(kept), symbols)
    return ordered


def _symbol_placeholders(graph: GraphModule) -> dict[Any, Node]:
    found: dict[Any, Node] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        symbol = torch_internals.plain_symbol(node.meta.get("val"))
        if symbol is not None:
            found.setdefault(symbol, node)
    return found


def _extract(graph: GraphModule, cut: Cut, kept: set[Node], symbols: Mapping[Any, Node]) -> None:
    """Fill in a cut's inputs, outputs and graph."""
    inside = set(cut.nodes)
    copied = _own_copies(cut.nodes, kept)
    position = {node: number for number, node in enumerate(graph.graph.nodes)}
    body = sorted([*cut.nodes, *copied], key=position.__getitem__)
    inputs = {
        used
        for node in body
        for used in node.all_input_nodes
        if used not in inside and used not in copied and used.op != "get_attr"
    }
    for node in [*body, *inputs]:
        for symbol in _symbols_of(node):
            if symbol in symbols:
                inputs.add(symbols[symbol])
    cut.inputs = sorted(inputs, key=position.__getitem__)
    cut.outputs = [node for node in cut.nodes if _read_outside(node, inside, kept)]
    region = Graph()
    new: dict[Node, Node] = {}
    for node in cut.inputs:
        new[node] = region.placeholder(node.name)
        new[node].meta = dict(node.meta)
    attributes = {used for node in body for used in node.all_input_nodes if used.op == "get_attr"}
    for node in [*sorted(attributes, key=position.__getitem__), *body]:
        new[node] = region.node_copy(node, new.__getitem__)
        new[node].meta = dict(node.meta)
    region.output(tuple(new[node] for node in cut.outputs))
    cut.graph = torch_internals.graph_module(graph, region, "Region")


def _own_copies(nodes: Sequence[Node], kept: set[Node]) -> set[Node]:
    """The board's nodes that these read, directly or through other ones of the board."""
    found: set[Node] = set()
    pending = [used for node in nodes for used in node.all_input_nodes if used in kept]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(used for used in node.all_input_nodes if used in kept)
    return found


def _read_outside(node: Node, inside: set[Node], kept: set[Node]) -> bool:
    """Whether a node's value is needed where it isn't in reach."""
    for user in node.users:
        if user in kept:
            if _read_outside(user, inside, kept):
                return True
        elif user not in inside:
            return True
    return False


def _symbols_of(node: Node) -> set[Any]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return {
        symbol
        for item in values
        if isinstance(item, torch.Tensor | torch.SymInt)
        for symbol in torch_internals.free_symbols(item)
    }


def signature(graph: GraphModule, backend: str, further: Sequence[Any]) -> str:
    """A canonical hash: equal for regions that the same lowered code can serve.

    It holds wiring, constants, and the metadata of every value; not names, not weights.
    """
    numbers: dict[Node, int] = {}
    parts: list[str] = [backend, *map(str, further)]

    def text(value: Any) -> str:
        if isinstance(value, Node):
            return f"%{numbers[value]}"
        if isinstance(value, list | tuple):
            return f"{type(value).__name__}({','.join(map(text, value))})"
        if isinstance(value, dict):
            return f"dict({','.join(f'{key}={text(item)}' for key, item in value.items())})"
        return f"{type(value).__name__}:{value!r}"

    for node in graph.graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "get_attr":
            target = _attribute_text(operator.attrgetter(str(node.target))(graph))
        elif node.op == "placeholder":
            target = ""
        else:
            target = target_name(node) if node.op == "call_function" else str(node.target)
        arguments = "" if node.op == "placeholder" else text(node.args) + text(node.kwargs)
        parts.append(f"{node.op} {target} {arguments} -> {_value_text(node.meta.get('val'))}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _value_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({','.join(map(_value_text, value))})"
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout == torch.strided else value.layout
        offset = value.storage_offset() if value.layout == torch.strided else 0
        return f"{value.dtype} {value.device} {tuple(value.shape)} {strides} {offset}"
    return repr(value)


def _attribute_text(value: Any) -> str:
    if isinstance(value, GraphModule):
        return signature(value, "", ())
    if isinstance(value, torch.Tensor):
        with torch_internals.real_tensors():
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{_value_text(value)} {hashlib.sha256(data).hexdigest()}"
    return repr(value)
