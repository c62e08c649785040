"""Values between int8 products stay integers: the rounding is moved to where they are made.

Rounding to a grid commutes with whatever only moves elements or takes the largest of several,
since it never falls where its argument grows. So ``quantize(max_pool(x))`` is
``max_pool(quantize(x))``, bit by bit, and ``quantize(dequantize(n))`` with the same scale and zero
point is ``n``: the integers are at most 255, and ``n * scale * (1 / scale)`` is nowhere near the
middle between two. A rounding that reaches a product in that way is done by it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard_mkldnn import _int8_kernels as kernels
from fuseboard_mkldnn import _ops
from fuseboard_mkldnn._graph import (
    TRANSPOSES,
    VIEWS,
    Editor,
    argument,
    aten,
    calls,
    erase_unused,
    sole_user,
    tensor,
)
from fuseboard_mkldnn._quantised_ops import dequantises, quantises

#: Ops of one tensor that move elements, and give integers what they give floats.
MOVES = frozenset(
    {
        *VIEWS,
        *TRANSPOSES,
        aten.alias.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.expand.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
    }
)

PRODUCTS = (kernels.linear, kernels.convolution)


def keep_integers(graph: GraphModule) -> str:
    """Round early, round within products, and spare the memory of what is left.

    :returns: a note of what the products' results are; "" where there are none.
    """
    products = [node for node in graph.graph.nodes if calls(node, *PRODUCTS)]
    waiting = [node for node in graph.graph.nodes if _is_fixed(node)]
    while waiting:
        node = waiting.pop()
        if not node._erased:
            waiting.extend(_moved_up(node))
    for node in list(graph.graph.nodes):
        if _is_fixed(node):
            _round_within(node)
    for node in graph.graph.nodes:
        if quantises(node):
            node.args, node.kwargs = (*node.args[:5], node.meta["val"].dtype), {}
            node.target = kernels.quantise
        elif dequantises(node):
            node.args, node.kwargs = node.args[:3], {}
            node.target = kernels.dequantised
    narrow = sum(not tensor(node).is_floating_point() for node in products)
    return f"results of int8 products: {narrow} of {len(products)} in int8" if products else ""


def _is_fixed(node: Node) -> bool:
    """Whether a node rounds to a grid that is known before a call."""
    return quantises(node) and len(node.args) == 6 and isinstance(node.args[1], float)


def _grid(node: Node) -> Any:
    """Scale, zero point, the smallest and the largest integer, their dtype."""
    return node.args[1:6]


def _moved_up(node: Node) -> list[Node]:
    """Move a rounding above what it rounds; the new ones in its place."""
    read = node.args[0]
    if (held := _undone(node)) is not None:
        node.replace_all_uses_with(held)
        erase_unused(node)
        return []
    if sole_user(read) is not node:
        return []
    if read.target in MOVES and read.all_input_nodes == [read.args[0]]:
        return [_swapped(node, read, [read.args[0]], lambda new: (new[0], *read.args[1:]))]
    if calls(read, aten.cat.default):
        parts = list(read.args[0])
        if all(map(_stays_narrow, parts)):
            return _swapped_all(node, read, parts)
        return []
    pool = read.args[0] if calls(read, operator.getitem) and read.args[1] == 0 else None
    if calls(pool, aten.max_pool2d_with_indices.default) and sole_user(pool) is read:
        return _pooled(node, read, pool)
    return []


def _undone(node: Node) -> Node | None:
    """The integers that a rounding gives back as they were, or None."""
    read = node.args[0]
    if not dequantises(read) or read.args[1:3] != node.args[1:3]:
        return None
    held = read.args[0]
    if tensor(held).dtype != node.args[5]:
        return None
    limits = torch.iinfo(node.args[5])
    inside = quantises(held) and held.args[3:5] == node.args[3:5]
    return held if inside or tuple(node.args[3:5]) == (limits.min, limits.max) else None


def _stays_narrow(part: Node) -> bool:
    """Whether rounding one part of a concatenation by itself leaves nothing wide behind."""
    return dequantises(part) or len(part.users) == 1


def _rounded(node: Node, source: Node) -> Node:
    """A rounding of ``source`` to the grid of ``node``."""
    val = tensor(source).to(node.args[5])
    return Editor(node).call(node.target, (source, *_grid(node)), val)


def _swapped(node: Node, read: Node, sources: list[Node], arguments: Any) -> Node:
    new = [_rounded(node, source) for source in sources]
    val = tensor(node)
    moved = Editor(node).call(read.target, arguments(new), val, dict(read.kwargs))
    node.replace_all_uses_with(moved)
    erase_unused(node)
    return new[0]


def _swapped_all(node: Node, read: Node, parts: list[Node]) -> list[Node]:
    new = [_rounded(node, part) for part in parts]
    args = (new, *read.args[1:])
    moved = Editor(node).call(read.target, args, tensor(node), dict(read.kwargs))
    node.replace_all_uses_with(moved)
    erase_unused(node)
    return new


def _pooled(node: Node, item: Node, pool: Node) -> list[Node]:
    """The same for a pool, by the kernel that torch has for integers."""
    kernel = _ops.integer_pool()
    val = tensor(pool.args[0])
    if kernel is None or val.dim() != 4 or node.args[5] != torch.uint8:
        return []
    new = _rounded(node, pool.args[0])
    size = pool.args[1]
    stride = argument(pool, 2, "stride", []) or size
    padding = argument(pool, 3, "padding", [0, 0])
    dilation = argument(pool, 4, "dilation", [1, 1])
    numbers = [
        list(one) * 2 if len(one) == 1 else list(one) for one in (size, stride, padding, dilation)
    ]
    args = (new, *numbers, argument(pool, 5, "ceil_mode", False))
    moved = Editor(node).call(kernel, args, tensor(node))
    node.replace_all_uses_with(moved)
    erase_unused(node)
    return [new]


def _round_within(node: Node) -> None:
    """Let the product that a rounding rounds do it."""
    product = node.args[0]
    if not calls(product, *PRODUCTS) or sole_user(product) is not node:
        return
    if product.kwargs or len(product.args) != (10 if product.target is kernels.linear else 12):
        return
    scale, zero_point, low, high, dtype = _grid(node)
    limits = torch.iinfo(dtype)
    product.args = (*product.args, (scale, zero_point, dtype))
    product.meta["val"] = tensor(node).new_empty_strided(
        tensor(product).shape, tensor(product).stride()
    )
    new = product
    if (low, high) != (limits.min, limits.max):
        new = Editor(node).call(aten.clamp.default, (product, low, high), tensor(node))
    node.replace_all_uses_with(new)
    erase_unused(node)
