"""Products of half types: linear layers, matrix products, convolutions and attention.

Their operands are cast to bfloat16 or float16, they accumulate in float32, and their results are
float32 again. All between them stays as it is: norms, softmax, activations, the residual stream.
The casts are ordinary ops, so that every backend can have such a graph; those of weights are
hoisted.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.contracts import Fusion, Narrowing
from fuseboard.fuse.narrow_integers import narrowing_to_int8
from fuseboard.fuse.narrow_weights import narrowing_to_int4
from fuseboard.fuse.reading import dtype_of, value_of
from fuseboard.fuse.writing import Writer
from fuseboard.hookspecs import hookimpl
from fuseboard.ops.attention import attention
from fuseboard.ops.estimate import is_view
from fuseboard.torch_api import formats

aten = torch.ops.aten

#: Op → the positions of its operands. A bias is one, a mask isn't.
_PRODUCTS: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.linear.default: (0, 1, 2),
    aten.addmm.default: (0, 1, 2),
    aten.convolution.default: (0, 1, 2),
    aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 1, 2),
    attention: (0, 1, 2),
}
#: Ops that move elements and round none; views besides.
_MOVES = frozenset({aten.clone.default, aten._unsafe_view.default})


@hookimpl
def fuseboard_narrow(graph: GraphModule) -> list[Narrowing] | None:
    """Offer products in half types for which the device has instructions, and in integers."""
    products = [node for node in graph.graph.nodes if _is_product(node)]
    if not products:
        return None
    found = [_narrowing(graph, products, dtype) for dtype in (torch.bfloat16, torch.float16)]
    in_integers = (narrowing_to_int8(graph), narrowing_to_int4(graph))
    return [*found, *(one for one in in_integers if one is not None)]


def _narrowing(graph: GraphModule, products: Sequence[Node], dtype: torch.dtype) -> Narrowing:
    devices = {device for node in products for device in _devices(node)}
    lacking = sorted(one for one in devices if not formats.has_products_of(dtype, one))
    name, narrower = str(dtype).removeprefix("torch."), _Narrower(graph, dtype)
    return Narrowing(
        name,
        "operands of products; sums and results are float32",
        tuple(Fusion(name, (node.name,), partial(narrower.narrow, node)) for node in products),
        problem=f"the {lacking[0].upper()} has no instructions for it" if lacking else "",
    )


def _is_product(node: Node) -> bool:
    """Whether a node is a product of float32 that can be narrowed."""
    if node.op != "call_function" or node.target not in _PRODUCTS:
        return False
    operands = _operands(node)
    if node.target is aten.addmm.default and not _is_bias(node.args[0]):
        return False  # what is added is as wide as the residual stream
    return bool(operands) and all(dtype_of(one) == torch.float32 for one in operands.values())


def _operands(node: Node) -> dict[int, Node]:
    places = (place for place in _PRODUCTS[node.target] if place < len(node.args))
    found = {place: node.args[place] for place in places}
    return {place: one for place, one in found.items() if isinstance(one, Node)}


def _is_bias(node: Any) -> bool:
    value = value_of(node)
    return value is not None and value.dim() < 2


def _devices(node: Node) -> set[str]:
    values = map(value_of, node.all_input_nodes)
    return {value.device.type for value in values if value is not None}


class _Narrower:
    """Narrows products of one graph to a half type, and casts nothing twice."""

    def __init__(self, graph: GraphModule, dtype: torch.dtype) -> None:
        self._graph = graph
        self._dtype = dtype
        #: Node → what it is in the half type.
        self._narrow: dict[Node, Node] = {}
        #: Casts of results to float32, and views and copies of these: half types hold them as well.
        self._widened: set[Node] = set()

    def narrow(self, product: Node) -> None:
        """Let a product read its operands in the half type."""
        write = Writer(self._graph, product)
        operands = {place: self._operand(one, write) for place, one in _operands(product).items()}
        args = [operands.get(place, value) for place, value in enumerate(product.args)]
        made = write.function(product.target, *args, **product.kwargs)
        pairs = [(product, made)]
        if not isinstance(
            made.meta["val"], torch.Tensor
        ):  # the result, and what its backward needs
            items = list(product.users)
            pairs = [(one, write.function(operator.getitem, made, one.args[1])) for one in items]
        for old, new in pairs:
            self._replace(old, new, write)
        self._erase_unread(product)
        self._erase_unread(made)

    def _replace(self, old: Node, new: Node, write: Writer) -> None:
        """Let readers have a result in the dtype that it had, if it is laid out as it was."""
        value = old.meta["val"]
        wide = new
        if dtype_of(new) != value.dtype:
            wide = write.function(aten._to_copy.default, new, dtype=value.dtype)
        if wide.meta["val"].stride() != value.stride():
            self._erase_unread(wide)
            return
        old.replace_all_uses_with(wide)
        if wide is not new:
            self._narrow[wide] = new
            self._widened.add(wide)

    def _erase_unread(self, node: Node) -> None:
        """Take out an op that nobody reads any more: one that might draw wouldn't go by itself."""
        for one in [*node.users, node]:
            if not one.users:
                self._graph.graph.erase_node(one)

    def _operand(self, node: Node, write: Writer) -> Node:
        if node not in self._narrow:
            self._narrow[node] = (
                write.function(node.target, self._operand(node.args[0], write), *node.args[1:])  # type: ignore[arg-type]
                if self._is_moved(node)
                else write.function(aten._to_copy.default, node, dtype=self._dtype)
            )
        return self._narrow[node]

    def _is_moved(self, node: Node) -> bool:
        """Whether a node moves elements of a product's result, and does nothing else."""
        moves = node.op == "call_function" and (is_view(node) or node.target in _MOVES)
        base = node.args[0] if moves and node.args and not node.kwargs else None
        if isinstance(base, Node) and (base in self._widened or self._is_moved(base)):
            self._widened.add(node)
        return node in self._widened and node not in self._narrow
