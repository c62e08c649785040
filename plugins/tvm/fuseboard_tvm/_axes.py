"""Fewer and longer axes: a kernel's shapes with adjacent axes made one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fuseboard_tvm._fusion import Kernel
from fuseboard_tvm._values import Gather, Reduce, Value, View


def collapsed(kernel: Kernel, roots: set[Value]) -> dict[Value, tuple[int, ...]]:
    """Shapes with adjacent axes made one, where nothing in the kernel tells them apart.

    Empty where views or gathers do, or where ranks differ in a way that broadcasting must see.
    """
    members = kernel.members
    values: set[Value] = set(members)
    pending = list(members)
    while pending:
        value = pending.pop()
        if isinstance(value, View | Gather):
            return {}
        if value in roots and value not in members:
            continue
        for one in value.inputs:
            if one not in values:
                values.add(one)
                pending.append(one)
    domain = kernel.shape
    if any(len(value.shape) > len(domain) for value in values):
        return {}
    padded = {
        value: (1,) * (len(domain) - len(value.shape)) + value.shape
        if not isinstance(value, Reduce) or len(value.shape) == len(domain)
        else None
        for value in values
    }
    if any(shape is None for shape in padded.values()):
        return {}
    patterns = [tuple(shape[axis] == 1 for shape in padded.values()) for axis in range(len(domain))]
    cut = {0, len(kernel.lead)} if kernel.lead else {0}
    starts = [
        axis
        for axis in range(len(domain))
        if axis in cut or (domain[axis] != 1 and _differs(patterns, domain, axis))
    ]
    if not starts:
        return dict.fromkeys(values, ()) if not domain else {}
    if kernel.lead is not None and sum(start < len(kernel.lead) for start in starts) > 1:
        return {}
    ends = [*starts[1:], len(domain)]
    return {
        value: tuple(math.prod(shape[a:b]) for a, b in zip(starts, ends, strict=True))
        for value, shape in padded.items()
    }


def _differs(patterns: Sequence[Any], domain: Sequence[int], axis: int) -> bool:
    """Whether an axis is broadcast otherwise than the last one before it that has elements."""
    for before in range(axis - 1, -1, -1):
        if domain[before] != 1:
            return bool(patterns[before] != patterns[axis])
    return False
