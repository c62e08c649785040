"""Rotary position embedding, and its gradient."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from fuseboard_triton._ir import same
from fuseboard_triton._torch_internals import size_of
from fuseboard_triton.kernels import rotary
from fuseboard_triton.patterns.nodes import (
    FLOATS,
    Match,
    calls,
    equal_shapes,
    is_contiguous,
    is_last,
    meta,
    one_reader,
    width_of,
)

aten = torch.ops.aten


def _rotary(node: Node) -> Match | None:
    """``x * cos + cat([-x2, x1]) * sin``, and its gradient ``g * cos + cat([gs2, -gs1])``."""
    if not calls(node, aten.add.Tensor) or node.kwargs or len(node.args) != 2:
        return None
    for plain, crossed in (node.args, node.args[::-1]):
        if not calls(plain, aten.mul.Tensor):
            continue
        match = _rotation(node, plain, crossed) or _rotation_back(node, plain, crossed)
        if match is not None:
            return match
    return None


def _rotation(node: Node, plain: Node, crossed: Any) -> Match | None:
    if not calls(crossed, aten.mul.Tensor) or not one_reader(plain, crossed):
        return None
    for joined, sin in (crossed.args, crossed.args[::-1]):
        parts = _joined(joined)
        if parts is None or not calls(parts[0], aten.neg.default):
            continue
        second, first = _half(parts[0].args[0]), _half(parts[1])
        if first is None or second is None or first[0] is not second[0]:
            continue
        x = first[0]
        if (first[1], second[1]) == (0, 1) and x in plain.args and one_reader(joined):
            cos = next((arg for arg in plain.args if arg is not x), x)
            nodes = (plain, crossed, joined, parts[0], node)
            return _rotary_match(node, x, cos, sin, _rotary_kernel, "rotary", nodes)
    return None


def _rotation_back(node: Node, plain: Node, joined: Any) -> Match | None:
    parts = _joined(joined)
    if parts is None or not calls(parts[1], aten.neg.default) or not one_reader(joined, plain):
        return None
    second, first = _half(parts[0]), _half(parts[1].args[0])
    if first is None or second is None or first[0] is not second[0]:
        return None
    product = first[0]
    if (first[1], second[1]) != (0, 1) or not calls(product, aten.mul.Tensor):
        return None
    for grad, sin in (product.args, product.args[::-1]):
        if grad in plain.args and len(product.users) <= 2:
            cos = next((arg for arg in plain.args if arg is not grad), grad)
            nodes = (plain, joined, parts[1], product, node)
            match = _rotary_match(node, grad, cos, sin, _rotary_grad, "rotary_backward", nodes)
            if match is not None:
                return match
    return None


def _joined(node: Any) -> tuple[Any, Any] | None:
    """The two tensors that are joined along the last dimension."""
    if not calls(node, aten.cat.default):
        return None
    tensors, dim = (*node.args, 0)[:2]
    if len(tensors) != 2 or not is_last(dim, node):
        return None
    return tensors[0], tensors[1]


def _half(node: Any) -> tuple[Node, int] | None:
    """What a node is the first (0) or second (1) half of, along the last dimension."""
    if calls(node, operator.getitem):
        split, number = node.args
        if calls(split, aten.split.Tensor) and len(split.meta["val"]) == 2:
            source, size, dim = (*split.args, 0)[:3]
            if is_last(dim, source) and same(2 * size, size_of(meta(source).shape[-1])):
                return source, number
        return None
    if not calls(node, aten.slice.Tensor):
        return None
    if len(node.args) != 4:
        return None  # a step, or to the end of an unnamed dimension
    source, dim, start, end = node.args
    width = size_of(meta(source).shape[-1])
    if not is_last(dim, source) or not isinstance(width, int) or width % 2:
        return None
    bounds = (start or 0, min(end, width) if isinstance(end, int) else end)
    return {(0, width // 2): (source, 0), (width // 2, width): (source, 1)}.get(bounds)


def _rotary_match(
    node: Node, x: Any, cos: Any, sin: Any, kernel: Any, name: str, nodes: tuple[Node, ...]
) -> Match | None:
    tensors = [x, cos, sin]
    if not all(isinstance(t, Node) and isinstance(meta(t), torch.Tensor) for t in tensors):
        return None
    if any(meta(t).dtype not in FLOATS for t in tensors) or not 1 <= meta(x).dim() <= 4:
        return None
    if not equal_shapes(node, x) or not all(_reaches(t, x) for t in (cos, sin)):
        return None
    width = width_of(x)
    if not width or width % 2 or width > 1024:
        return None
    strides = None
    if not is_contiguous(meta(node)):
        strides = [size_of(stride) for stride in meta(node).stride()]
        if not all(isinstance(stride, int) for stride in strides):
            return None
    return Match(name, kernel, (x, cos, sin, strides), nodes, {0: node}, only=True)


def _reaches(table: Any, x: Any) -> bool:
    """Whether a table broadcasts to ``x`` without making it larger, and has all of its columns."""
    small, large = meta(table).shape, meta(x).shape
    if not 1 <= len(small) <= len(large):
        return False
    pairs = list(zip(reversed(small), reversed(large), strict=False))
    sizes = [(size_of(m), size_of(n)) for m, n in pairs]
    return same(*sizes[0]) and all(same(m, 1) or same(m, n) for m, n in sizes)


def _rotary_kernel(*args: Any) -> tuple[torch.Tensor, ...]:
    return (rotary.rotary(*args),)


def _rotary_grad(*args: Any) -> tuple[torch.Tensor, ...]:
    return (rotary.rotary_backward(*args),)


FINDERS = (_rotary,)
