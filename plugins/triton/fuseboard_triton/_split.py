"""Reductions in two steps, where one step would keep only a few programs busy.

The sum over all rows of ``(4096, 768)`` has twelve programs of 64 columns each, a sum over
everything has one. Such a reduction is made of two: over parts of what is reduced, then over the
parts. Only known sizes are split, at a divisor, so that no part is shorter than the others.
"""

from __future__ import annotations

import torch

from fuseboard_triton import _ir
from fuseboard_triton._ir import Value, product, reshape

#: Programs that keep a GPU busy, and how many of its columns a program takes.
PROGRAMS, COLUMNS = 256, 64
#: What is reduced at least, in rows and in columns, for a second kernel to pay; and in each part.
LEAST_ROWS, LEAST_COLUMNS = 65536, 512
PART_ROWS, PART_COLUMNS = 4096, 32


def reduce(op: str, value: Value, dims: tuple[int, ...], compute: torch.dtype) -> Value:
    """A reduction that keeps the reduced dimensions with size 1, in one step or in two."""
    parts = parts_of(value.shape, dims)
    if parts < 2:
        return _ir.reduce(op, value, dims, compute)
    first, last = dims[0], dims[-1]
    before, after = value.shape[:first], value.shape[last + 1 :]
    count = product(value.shape[first : last + 1])
    split = reshape(value, (*before, parts, count // parts, *after))
    partly = _ir.reduce(op, split, (first + 1,), compute)
    whole = _ir.reduce(op, partly, (first,), compute)
    return reshape(whole, (*before, *(1 for _ in dims), *after))


def parts_of(shape: tuple[object, ...], dims: tuple[int, ...]) -> int:
    """Into how many parts to split; 1 for one step."""
    sizes = [size for size in shape if isinstance(size, int)]
    neighbours = bool(dims) and dims == tuple(range(dims[0], dims[-1] + 1))
    if len(sizes) < len(shape) or not neighbours or 0 in sizes:
        return 1
    count = product(sizes[dim] for dim in dims)
    outer = product(sizes) // count
    rows = dims[-1] == len(sizes) - 1
    programs = outer if rows else max(outer // COLUMNS, 1)
    if count < (LEAST_ROWS if rows else LEAST_COLUMNS) or 2 * programs > PROGRAMS:
        return 1
    most = min(PROGRAMS // programs, count // (PART_ROWS if rows else PART_COLUMNS))
    return next((parts for parts in range(most, 1, -1) if count % parts == 0), 1)
