"""What a pattern is told by, and what all patterns look at nodes with."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fuseboard_triton._ir import contiguous_strides, same
from fuseboard_triton._torch_internals import size_of
from fuseboard_triton.kernels._launching import LONGEST_ROW

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Match:
    """One place where a written kernel fits.

    :ivar nodes: what it computes; those of them that others read as well stay.
    :ivar outputs: position in what the kernel returns → the node whose value that is.
    :ivar only: no generated kernel computes all of these nodes.
    """

    name: str
    kernel: Callable[..., tuple[Any, ...]]
    args: tuple[Any, ...]
    nodes: tuple[Node, ...]
    outputs: dict[int, Node]
    only: bool = False


class ABSENT:
    """Stands for an op that this torch doesn't have."""

    default = None


def calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def meta(node: Any) -> torch.Tensor:
    return node.meta["val"]  # type: ignore[no-any-return]


def is_plain(*nodes: Any) -> bool:
    """Whether these are contiguous floating tensors of one dtype."""
    values = [meta(node) for node in nodes if node is not None]
    if not all(isinstance(v, torch.Tensor) and v.dtype in FLOATS for v in values):
        return False
    return len({v.dtype for v in values}) == 1 and all(is_contiguous(v) for v in values)


def is_contiguous(value: torch.Tensor) -> bool:
    shape = tuple(size_of(size) for size in value.shape)
    strides = [size_of(stride) for stride in value.stride()]
    pairs = zip(shape, strides, contiguous_strides(shape), strict=True)
    return all(same(size, 1) or same(have, want) for size, have, want in pairs)


def equal_shapes(a: Any, b: Any) -> bool:
    one, other = meta(a).shape, meta(b).shape
    return len(one) == len(other) and all(
        same(size_of(m), size_of(n)) for m, n in zip(one, other, strict=True)
    )


def width_of(node: Any) -> int:
    """The static size of the last dimension; 0 where it isn't, or isn't one that kernels take."""
    shape = meta(node).shape
    width = size_of(shape[-1]) if len(shape) else 0
    return width if isinstance(width, int) and 0 < width <= LONGEST_ROW else 0


def is_last(dim: int, node: Any) -> bool:
    """Whether a dimension, counted from either end, is the last one."""
    rank = meta(node).dim()
    return rank > 0 and dim % rank == rank - 1


def items(node: Node) -> dict[int, Node]:
    """The results of a node of several that are read, by position."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}  # type: ignore[misc]


def one_reader(*nodes: Node) -> bool:
    return all(len(node.users) == 1 for node in nodes)


def residual_of(x: Node) -> tuple[Any, Any] | None:
    """The operands of a sum of two tensors of its own shape and dtype."""
    if not calls(x, aten.add.Tensor) or x.kwargs or len(x.args) != 2:
        return None
    a, b = x.args
    if not (isinstance(a, Node) and isinstance(b, Node) and isinstance(meta(a), torch.Tensor)):
        return None
    if not isinstance(meta(b), torch.Tensor) or not is_plain(x, a, b):
        return None
    return (a, b) if equal_shapes(x, a) and equal_shapes(x, b) else None
