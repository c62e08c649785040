"""Hoisting: what depends on static inputs alone is computed when a weight changes, not per call.

The region is split into a *prepare* graph (static inputs → prepared values) and the graph that
runs in every call and takes the prepared values as further inputs. Weights stay inputs.

A quantised weight stays quantised. As floats it would be kept a second time in four times the
memory or more, and a product of few rows takes as long as its weight takes to be read.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from fuseboard.ops.effects import drop_unread, order_keepers
from fuseboard.ops.estimate import is_attention, is_contraction, is_free, sizes, value_bytes
from fuseboard.ops.views import view_chain
from fuseboard.torch_api.copies import graph_module

#: Elements that hoisting must save from being computed in each call. Below it, the check that
#: the weights are still the same costs about what it saves.
MIN_ELEMENTS = 16_384

#: Besides pointwise ops, what makes each number of another one.
_COPIES = frozenset(
    {
        *("aten::_to_copy", "aten::clone", "aten::cat", "aten::stack", "aten::_unsafe_view"),
        "prims::convert_element_type",
        *(
            f"quantized_decomposed::dequantize_per_{kind}"
            for kind in ("tensor", "channel", "channel_group")
        ),
    }
)


@dataclass(frozen=True)
class Hoisted:
    """A region's graph split in two.

    :ivar prepare: takes the region's inputs at ``uses``, returns the prepared values.
    :ivar uses: positions of the region's inputs that ``prepare`` reads.
    :ivar graph: the graph for every call; its inputs are the region's inputs at ``keeps``, then
        the prepared values.
    """

    prepare: GraphModule
    uses: tuple[int, ...]
    graph: GraphModule
    keeps: tuple[int, ...]
    values: int


def hoist(
    graph: GraphModule, static_inputs: Collection[int], made_by_fusions: Collection[str]
) -> Hoisted | None:
    """Split a region's graph, or None where hoisting doesn't pay.

    :param static_inputs: positions of inputs that are parameters or buffers and that the graph
        doesn't mutate.
    :param made_by_fusions: names of nodes that a backend's rewrites put in: a packed weight is
        hoisted however small, since its rewrite counted on that.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    constant = _constant_nodes(graph, {placeholders[i] for i in static_inputs})
    exposed = _reaches_output(graph)
    frontier = [
        node
        for node in graph.graph.nodes
        if node in constant
        and node.op == "call_function"
        and node not in exposed
        and not _unpacks(node)
        and not isinstance(node.meta.get("val"), list | tuple)
        and any(user not in constant for user in node.users)
        and _pays(node, constant, made_by_fusions)
    ]
    if not frontier:
        return None
    return _split(graph, frontier)


def _constant_nodes(graph: GraphModule, static: set[Node]) -> set[Node]:
    """Static inputs and pure ops whose every input is constant."""
    constant = set(static)
    ordered = order_keepers(graph.graph.nodes)
    for node in graph.graph.nodes:
        if (
            node.op == "call_function"
            and node.all_input_nodes
            and node not in ordered
            and all(used in constant for used in node.all_input_nodes)
            and not widens(node)
        ):
            constant.add(node)
    return constant


def widens(node: Node) -> bool:
    """Whether a node makes floats of a quantised weight that only products and convolutions read.

    Quantised are large tensors of integers, whatever is packed in these, or of floats in 8 bits.
    Tables that are looked up aren't read as a whole, and a mask is read by each layer.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return False
    if not _is_elementwise(node.target) or math.prod(sizes(value)) < MIN_ELEMENTS:
        return False
    read = [used.meta.get("val") for used in node.all_input_nodes]
    return any(_is_stored(one, value) for one in read) and all(map(_multiplies, _readers(node)))


def _is_stored(read: Any, value: torch.Tensor) -> bool:
    """Whether ``value`` has a float for each quantised number in ``read``."""
    if not isinstance(read, torch.Tensor) or sizes(read) != sizes(value):
        return False
    if read.dtype.is_floating_point:
        return read.itemsize == 1 < value.itemsize
    return read.dtype != torch.bool and not read.dtype.is_complex


def _multiplies(node: Node) -> bool:
    """Whether a node reads a weight as a whole, once."""
    return is_contraction(node) and not is_attention(node)


def _readers(node: Node) -> set[Node]:
    """What reads the elements of a value in the end: through views, copies and pointwise ops."""
    found: set[Node] = set()
    seen: set[Node] = set()
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user in seen:
                continue
            seen.add(user)
            passed = user.op == "call_function" and (is_free(user) or _is_elementwise(user.target))
            (pending.append if passed else found.add)(user)
    return found


def _is_elementwise(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or target._schema.name in _COPIES
    )


def _unpacks(node: Node) -> bool:
    """Whether a node makes integers of a quantised weight, in more bytes than it is stored in."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype.is_floating_point:
        return False
    if not node.users or not all(map(widens, node.users)):
        return False
    seen, pending = {node}, [node]
    while pending:
        new = [used for used in pending.pop().all_input_nodes if used not in seen]
        seen.update(new)
        pending.extend(new)
    stored = sum(value_bytes(one.meta.get("val")) for one in seen if one.op == "placeholder")
    return value_bytes(value) > stored


def _reaches_output(graph: GraphModule) -> set[Node]:
    """Nodes whose storage the caller gets: a prepared value must never be handed out."""
    output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
    return {node for result in output.all_input_nodes for node in view_chain(result)}


def _pays(node: Node, constant: set[Node], made_by_fusions: Collection[str]) -> bool:
    work, seen, pending = 0, set(), [node]
    while pending:
        current = pending.pop()
        if current in seen or current.op != "call_function":
            continue
        seen.add(current)
        if current.name in made_by_fusions and not is_free(current):
            return True
        if not is_free(current):
            made = tree_leaves(current.meta.get("val"))  # an op may have several results
            work += sum(math.prod(sizes(one)) for one in made if isinstance(one, torch.Tensor))
        pending.extend(used for used in current.all_input_nodes if used in constant)
    return work >= MIN_ELEMENTS


def _split(graph: GraphModule, frontier: list[Node]) -> Hoisted:
    placeholders = graph.graph.find_nodes(op="placeholder")
    needed: set[Node] = set()
    pending = list(frontier)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    prepare = Graph()
    new: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        if node in needed:
            new[node] = prepare.node_copy(node, new.__getitem__)
            new[node].meta = dict(node.meta)
    prepare.output(tuple(new[node] for node in frontier))
    uses = tuple(i for i, node in enumerate(placeholders) if node in needed)
    prepared = graph_module(graph, prepare, "Prepare")

    last = placeholders[-1]
    with graph.graph.inserting_after(last):
        for node in reversed(frontier):
            value = graph.graph.placeholder(f"prepared_{node.name}")
            value.meta = dict(node.meta)
            node.replace_all_uses_with(value)
    drop_unread(graph.graph)
    keeps = []
    for i, node in enumerate(placeholders):
        if node.users or i not in uses:
            keeps.append(i)
        else:
            graph.graph.erase_node(node)
    graph.recompile()
    return Hoisted(prepared, uses, graph, tuple(keeps), len(frontier))
