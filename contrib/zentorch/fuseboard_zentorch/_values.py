"""Questions about nodes and their fake values, none of which adds a guard on a symbolic size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

Size = int | torch.SymInt


def tensor(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node; None if it hasn't exactly one."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def tensors(node: Node) -> list[torch.Tensor]:
    """All fake tensors of a node."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [one for one in values if isinstance(one, torch.Tensor)]


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or keyword."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def sole_user(node: Node) -> Node | None:
    """The one node that reads ``node`` (the output counts), or None."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def equal(left: Size, right: Size) -> bool:
    """Whether two sizes are known to be equal."""
    return bool(statically_known_true(left == right))


def above_one(size: Size) -> bool:
    """Whether a size is known to be 2 or more."""
    return bool(statically_known_true(size >= 2))


def same_sizes(left: Sequence[Size], right: Sequence[Size]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(left) == len(right) and all(map(equal, left, right))


def is_empty(value: torch.Tensor) -> bool:
    """Whether a tensor is known to have no elements."""
    return any(equal(size, 0) for size in value.shape)


def is_contiguous(value: torch.Tensor) -> bool:
    """Whether a tensor is known to be contiguous, row-major."""
    expected: Size = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not equal(size, 1):
            if not equal(stride, expected):
                return False
            expected = expected * size
    return True


def sizes_from_data(values: Iterable[torch.Tensor]) -> bool:
    """Whether a size is known only from data."""
    return any(free_unbacked_symbols(value) for value in values)


def macs(*sizes: Size) -> int:
    """A product of sizes, with those of the example in the place of symbols."""
    return math.prod(size if isinstance(size, int) else int(size.node.hint) for size in sizes)
