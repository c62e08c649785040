"""The form of a fake tensor: dtype, device, sizes and strides. No question adds a guard."""

from __future__ import annotations

from typing import Any

import torch


def are_alike(one: Any, other: Any) -> bool:
    """Whether two fake tensors have one form."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if (one.dtype, one.device, one.layout) != (other.dtype, other.device, other.layout):
        return False
    if one.dim() != other.dim() or one.is_conj() or one.is_neg():
        return False
    pairs = zip((*one.shape, *one.stride()), (*other.shape, *other.stride()), strict=True)
    return all(_is_same_number(*pair) for pair in pairs)


def _is_same_number(one: Any, other: Any) -> bool:
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return bool(one.node.expr == other.node.expr)
    return type(one) is type(other) and bool(one == other)


def _is_one(size: Any) -> bool:
    return type(size) is int and size == 1


def is_dense(value: torch.Tensor) -> bool:
    """Whether each element has memory of its own, and nothing lies between them.

    False, too, where sizes are symbolic and only a guard would tell.
    """
    if value.layout is not torch.strided:
        return False
    left = [pair for pair in zip(value.shape, value.stride(), strict=True) if not _is_one(pair[0])]
    length: Any = 1
    while left:
        following = next((pair for pair in left if _is_same_number(pair[1], length)), None)
        if following is None:
            return False
        left = [pair for pair in left if pair is not following]
        length = length * following[0]
    return True
