"""From ATen nodes to values. What can't be computed raises :class:`Unsupported` with the reason.

The same code decides about claims, one node at a time, and builds regions. The ops are in
``_elementwise``, ``_shapes`` and ``_reductions``; those of several steps in ``_composites``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fuseboard_triton._ir import STORED, Unsupported, Value, copied
from fuseboard_triton._torch_internals import size_of

aten = torch.ops.aten
prims = torch.ops.prims

#: ATen op → function of (node, operands as values and numbers) → value or several.
BUILDERS: dict[Any, Callable[..., Any]] = {}


def builder(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what builds these ops."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        BUILDERS.update(dict.fromkeys(targets, function))
        return function

    return register


def build_op(node: Node, values: Callable[[Node], Any]) -> Any:
    """What the function that is registered for a node makes: a value, or a tuple of them.

    :param values: what an input node stands for: a value, a tuple, or a number's expression.
    :raises Unsupported: kernels don't compute this.
    """
    if node.target is operator.getitem:
        source = values(node.args[0])  # type: ignore[arg-type]
        if not isinstance(source, tuple):
            raise Unsupported("an item of what is no tuple of tensors")
        return source[node.args[1]]  # type: ignore[index]
    function = BUILDERS.get(node.target)
    if function is None:
        raise Unsupported(f"{node.target} has no kernel here")
    args = torch.fx.map_arg(node.args, values)
    kwargs = torch.fx.map_arg(node.kwargs, values)
    result = function(node, *args, **kwargs)
    metas = node.meta["val"]
    if isinstance(result, tuple):
        return tuple(owned(v, m, node) for v, m in zip(result, metas, strict=True))
    return owned(result, metas, node)


def owned(value: Value | None, meta: Any, node: Node) -> Value | None:
    """A node's value with the strides that it has in memory."""
    if value is None:
        return None
    if value.dtype != meta.dtype or len(value.shape) != meta.dim():
        raise AssertionError(f"{node.target}: {value.dtype} {value.shape}, ATen's is {meta}")
    if node.target in VIEWS:
        return value
    if value.kind == "view" or value.meta is not None:
        value = copied(value)
    value.meta = meta
    return value


def buffer(meta: torch.Tensor) -> Value:
    """A tensor in memory.

    :raises Unsupported: kernels don't read it.
    """
    if meta.dtype not in STORED:
        raise Unsupported(f"dtype {str(meta.dtype).removeprefix('torch.')} isn't supported")
    if meta.layout != torch.strided or meta.is_conj() or meta.is_neg():
        raise Unsupported("tensors that aren't plain strided ones aren't supported")
    return Value("buffer", meta.dtype, shape_of(meta), meta=meta)


def shape_of(meta: torch.Tensor) -> tuple[Any, ...]:
    return tuple(size_of(size) for size in meta.shape)


def meta_of(node: Node) -> torch.Tensor:
    """The fake result of a node of one result."""
    meta = node.meta["val"]
    if meta.dtype not in STORED:
        raise Unsupported(f"dtype {str(meta.dtype).removeprefix('torch.')} isn't supported")
    return meta  # type: ignore[no-any-return]


#: What hands its operand on under other sizes.
VIEWS = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.flatten.using_ints,
        aten.expand.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
    }
)
