"""Weights that a graph computes from quantised numbers, as something to compute in parts.

A product reads a weight by its columns, (K, N). A weight is *row by row* where each of the N is
computed from its own part of what is stored: then some of them can be made, multiplied and
forgotten before the next ones are made, in memory that stays in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

import fuseboard
from fuseboard_mkldnn._bindings import bind
from fuseboard_mkldnn._graph import (
    TRANSPOSES,
    VIEWS,
    aten,
    calls,
    is_contiguous,
    is_view,
    tensor,
)

#: Ops that make each number of those at the same place, after broadcasting.
_COPIES = (aten._to_copy.default, aten.clone.default)
SIZED_VIEWS = (*VIEWS, aten.reshape.default)
_RESHAPES = (*SIZED_VIEWS, aten.unsqueeze.default, aten.squeeze.dim)
_IN_PLACE = {
    aten.add.Tensor: torch.Tensor.add_,
    aten.div.Tensor: torch.Tensor.div_,
    aten.mul.Tensor: torch.Tensor.mul_,
    aten.sub.Tensor: torch.Tensor.sub_,
}


@dataclass
class QuantisedWeight:
    """How a weight is computed.

    :ivar root: the weight, (K, N).
    :ivar nodes: what computes it, in the graph's order, the scale aside.
    :ivar rows: for each of these and of what they read, the dimension that holds the N; None
        where it is the same for all of them.
    :ivar scale: one number for each of the N, by which the product is multiplied instead.
    :ivar scaled: the multiplication by ``scale`` that is left out, and what it multiplies.
    :ivar held: a node with floats → the same numbers as integers of a byte, which are there
        before. It isn't among ``nodes``.
    """

    root: Node
    nodes: list[Node] = field(default_factory=list)
    rows: dict[Node, int | None] = field(default_factory=dict)
    scale: Node | None = None
    scaled: tuple[Node, Node] | None = None
    held: dict[Node, Node] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Node]:
        """What ``nodes`` read, and what is held: stored numbers, scales, zero points."""
        own = {*self.nodes, *self.held}
        read = dict.fromkeys(used for node in self.nodes for used in node.all_input_nodes)
        done = self.scaled[0] if self.scaled is not None else None
        left = [node for node in read if node not in own and node is not done]
        return list(dict.fromkeys([*left, *self.held.values()]))

    def hold(self, floats: Node, integers: Node) -> None:
        """Read floats from integers of a byte, so that what made the floats isn't needed."""
        self.held[floats] = integers
        self.rows[integers] = self.rows[floats]
        needed, left = set(self.held), [self.root]
        if self.scaled is not None:
            left.append(self.scaled[1])
        while left:
            node = left.pop()
            if node not in needed:
                needed.add(node)
                left.extend(node.all_input_nodes)
        self.nodes = [node for node in self.nodes if node in needed and node not in self.held]

    def stored_as_int8(self) -> Node | None:
        """The (N, K) integers that are the weight but for its scale, or None."""
        node = untransposed(self.root)
        if self.scaled is not None and node is self.scaled[0]:
            node = untransposed(self.scaled[1])
        if not calls(node, aten._to_copy.default):
            return None
        node = untransposed(node.args[0])
        found = tensor(node)
        plain = node.op == "placeholder" and found.dtype == torch.int8 and found.dim() == 2
        return node if plain and self.rows[node] == 0 and is_contiguous(found) else None


def quantised_weight(columns: Node, stored: set[Node]) -> QuantisedWeight | None:
    """How a (K, N) weight is computed row by row, or None where it isn't.

    :param stored: what depends on quantised numbers, as :func:`depend_on_integers` gives it.
    """
    if columns not in stored:
        return None
    found = QuantisedWeight(columns)
    if not _visit(found, columns, 1, stored) or not any(map(fuseboard.widens, found.nodes)):
        return None
    order = {node: position for position, node in enumerate(columns.graph.nodes)}
    found.nodes.sort(key=order.__getitem__)
    _take_scale_out(found)
    return found


def depend_on_integers(graph: GraphModule) -> set[Node]:
    """Integers and 8-bit floats that the graph is given, and what depends on them."""
    found: set[Node] = set()
    for node in graph.graph.nodes:
        value = tensor(node)
        if node.op == "placeholder" and value is not None:
            narrow = value.dtype.is_floating_point and value.itemsize == 1
            if narrow or not (value.dtype.is_floating_point or value.dtype.is_complex):
                found.add(node)
        elif node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _visit(weight: QuantisedWeight, node: Node, dim: int | None, stored: set[Node]) -> bool:
    """Note in which dimension a node and what it reads hold the N; False where that isn't known."""
    if node in weight.rows:
        return weight.rows[node] == dim
    if tensor(node) is None or not all(type(size) is int for size in tensor(node).shape):
        return False
    weight.rows[node] = dim
    if node.op != "call_function" or node not in stored:
        return node.op in ("call_function", "placeholder")
    read = _read(node, dim)
    if read is None:
        return False
    weight.nodes.append(node)
    return all(_visit(weight, used, its, stored) for used, its in read)


def _read(node: Node, dim: int | None) -> list[tuple[Node, int | None]] | None:
    """What a node reads, each with the dimension of the N; None where the op isn't known."""
    target, value = node.target, tensor(node)
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if dim is None:
        return [(used, None) for used in node.all_input_nodes]
    if torch.Tag.pointwise in target.tags or target in _COPIES:
        return [(used, _broadcast(tensor(used), value, dim)) for used in node.all_input_nodes]
    source = node.args[0]
    if target in (aten.stack.default, aten.cat.default):
        at = _positive(node.args[1] if len(node.args) > 1 else 0, value.dim())
        if at == dim:
            return None
        within = dim - 1 if target is aten.stack.default and dim > at else dim
        return [(used, within) for used in node.all_input_nodes]
    if not isinstance(source, Node) or tensor(source) is None:
        return None
    within = _source_dimension(node, tensor(source), value, dim)
    if within is None:
        return None
    return [(used, within if used is source else None) for used in node.all_input_nodes]


def _source_dimension(
    node: Node, source: torch.Tensor, value: torch.Tensor, dim: int
) -> int | None:
    """The dimension of its one input that a view's ``dim`` is."""
    if node.target in _RESHAPES:
        before = math.prod(value.shape[:dim])
        places = range(source.dim())
        same = [d for d in places if math.prod(source.shape[:d]) == before]
        return next((d for d in same if source.shape[d] == value.shape[dim]), None)
    if calls(node, aten.t.default):
        return 1 - dim
    if calls(node, aten.permute.default):
        return _positive(node.args[1][dim], value.dim())
    if calls(node, aten.transpose.int):
        first, second = (_positive(one, value.dim()) for one in node.args[1:3])
        return {first: second, second: first}.get(dim, dim)
    if calls(node, aten.expand.default):
        return _broadcast(source, value, dim)
    if calls(node, aten.slice.Tensor, aten.select.int):
        at = _positive(node.args[1] if len(node.args) > 1 else 0, source.dim())
        if calls(node, aten.select.int):
            return dim if dim < at else dim + 1
        return None if at == dim else dim
    if calls(node, aten.index.Tensor):
        # Scales that are looked up by the group of each of the K, as GPTQ's are.
        indices = node.args[1]
        first = tensor(indices[0])
        plain = len(indices) == 1 and first is not None and first.dim() == 1
        return dim if plain and dim > 0 else None
    return None


def _broadcast(used: torch.Tensor, value: torch.Tensor, dim: int) -> int | None:
    own = dim - (value.dim() - used.dim())
    return own if own >= 0 and used.shape[own] == value.shape[dim] else None


def _positive(dim: int, dims: int) -> int:
    return dim + dims if dim < 0 else dim


def _take_scale_out(weight: QuantisedWeight) -> None:
    """Multiply the product by a scale of each of the N, where that is the weight's last step.

    Not in float16, whose range the product could leave.
    """
    last = untransposed(weight.root)
    value = tensor(last)
    if not calls(last, aten.mul.Tensor) or value.dtype not in (torch.float32, torch.bfloat16):
        return
    for inner, scale in (last.args[:2], last.args[1::-1]):
        if not isinstance(scale, Node) or inner not in weight.nodes or scale in weight.nodes:
            continue
        dim, factor, made = weight.rows[scale], tensor(scale), tensor(inner)
        if dim is None or factor.numel() != factor.shape[dim] or factor.dtype != value.dtype:
            continue
        if made.shape == value.shape and made.dtype == value.dtype:
            weight.nodes.remove(last)
            weight.scale, weight.scaled = scale, (last, inner)
            return


def untransposed(node: Node) -> Node:
    """What a value is the transpose of, or itself."""
    while calls(node, *TRANSPOSES):
        node = node.args[0]
    return node


@dataclass(frozen=True)
class Widened:
    """Floats of a weight that are integers of a byte.

    :ivar floats: the node; ``integers`` minus ``shift``.
    :ivar low: the least of them.
    """

    floats: Node
    integers: Node
    shift: int
    low: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.low < 0 else torch.uint8


def widened(weight: QuantisedWeight) -> list[Widened]:
    """Where a weight's integers become floats, with an 8 that is subtracted afterwards."""
    found = []
    for node in weight.nodes:
        source = node.args[0] if calls(node, aten._to_copy.default) else None
        if not isinstance(source, Node) or not tensor(node).dtype.is_floating_point:
            continue
        limits = bounds(source)
        if limits is None or weight.rows[node] is None:
            continue
        shift, floats = 0, node
        user = next(iter(node.users)) if len(node.users) == 1 else node
        if calls(user, aten.sub.Tensor) and user in weight.nodes and user.args[0] is node:
            if type(user.args[1]) is int and not user.kwargs:
                shift, floats = user.args[1], user
        low, high = (limit - shift for limit in limits)
        if -128 <= low <= high <= (127 if low < 0 else 255):
            found.append(Widened(floats, source, shift, low))
    return found


def bounds(node: Node) -> tuple[int, int] | None:
    """The least and the greatest that integers can be, or None where that isn't known."""
    value = tensor(node)
    if value is None or value.dtype.is_floating_point or value.dtype == torch.bool:
        return None
    found = _bounds(node)
    limits = torch.iinfo(value.dtype)
    if found is not None and limits.min <= found[0] <= found[1] <= limits.max:
        return found
    return (limits.min, limits.max) if limits.bits == 8 else None


def _bounds(node: Node) -> tuple[int, int] | None:
    """The same, if nothing is cut off."""
    if calls(node, aten.stack.default, aten.cat.default):
        parts = [bounds(one) for one in node.args[0]]
        known = [one for one in parts if one is not None]
        if len(known) < len(parts):
            return None
        return min(low for low, _ in known), max(high for _, high in known)
    if calls(node, *SIZED_VIEWS, aten.clone.default, aten._to_copy.default):
        return bounds(node.args[0])
    if calls(node, aten.bitwise_and.Scalar) and node.args[1] >= 0:
        return 0, node.args[1]
    if calls(node, aten.sub.Tensor) and type(node.args[1]) is int and not node.kwargs:
        limits = bounds(node.args[0])
        return limits and (limits[0] - node.args[1], limits[1] - node.args[1])
    if calls(node, aten.__rshift__.Scalar) and tensor(node).dtype == torch.uint8:
        return 0, 255 >> node.args[1]
    return None


def in_a_byte(integers: torch.Tensor, shift: int, dtype: torch.dtype) -> torch.Tensor:
    """Integers minus a number, which are known to fit."""
    return integers.to(torch.int16).sub_(shift).to(dtype)


def rows_function(weight: QuantisedWeight) -> Callable[..., torch.Tensor]:
    """What makes some of the N from the same parts of the leaves, as (K, how many).

    After the leaves it takes memory for the floats of each of ``held``, which it writes over.
    """
    graph, new = Graph(), {}
    for leaf in weight.leaves:
        new[leaf] = graph.placeholder(leaf.name)
        new[leaf].meta["val"] = tensor(leaf)
    for floats, integers in weight.held.items():
        memory = graph.placeholder(f"{floats.name}_memory")
        memory.meta["val"] = tensor(floats)
        new[floats] = graph.call_function(torch.Tensor.copy_, (memory, new[integers]))
        new[floats].meta["val"] = tensor(floats)
        if weight.scaled is not None and floats is weight.scaled[1]:
            new[weight.scaled[0]] = new[floats]
    for node in weight.nodes:
        made = new[node] = graph.node_copy(node, new.__getitem__)
        made.meta = {"val": tensor(node)}
        dim = weight.rows[node]
        if dim is not None and calls(node, aten.expand.default, *SIZED_VIEWS):
            sizes = list(tensor(node).shape)
            sizes[dim] = -1
            made.args = (made.args[0], sizes)
        if weight.scaled is not None and node is weight.scaled[1]:
            new[weight.scaled[0]] = made
    graph.output(new[weight.root])
    module = GraphModule({}, graph)
    _overwrite(module)
    bind(module)
    module.recompile()
    return module.forward


def _overwrite(graph: GraphModule) -> None:
    """Let arithmetic write over an operand that nothing else reads."""
    fresh: set[Node] = set()
    for node in graph.graph.nodes:
        value = tensor(node)
        source = node.args[0] if node.args else None
        if node.op != "call_function" or value is None:
            continue
        if node.target is torch.Tensor.copy_ or not is_view(node.target):
            fresh.add(node)
        elif source in fresh and len(source.users) == 1:
            fresh.add(node)
        if node.target in _IN_PLACE and source in fresh and len(source.users) == 1:
            had = tensor(source)
            if had.shape == value.shape and had.dtype == value.dtype and not node.kwargs:
                node.target = _IN_PLACE[node.target]
