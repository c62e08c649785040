"""How tensors lie in memory: ONNX Runtime knows row-major ones only.

A dense tensor in another order of dimensions (channels-last, a transposed result) is handed over
as its row-major permutation, and the graph permutes it back; ONNX Runtime often moves that
transposition into a product. So nothing is copied on the way in or out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuseboard_onnxruntime._torch_internals import known_equal, size_hint


def permutation(value: torch.Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which a fake tensor is row-major; None: it has gaps."""
    order = sorted(
        range(value.dim()),
        key=lambda d: (-size_hint(value.stride(d)), -size_hint(value.size(d)), d),
    )
    empty = any(known_equal(size, 0) for size in value.shape)
    if empty or is_row_major(value, range(value.dim())):
        return tuple(range(value.dim()))
    return tuple(order) if is_row_major(value, order) else None


def is_row_major(value: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether a fake tensor, its dimensions in this order, is known to be row-major."""
    expected: int | torch.SymInt = 1
    for d in reversed(order):
        if not known_equal(value.size(d), 1):
            if not known_equal(value.stride(d), expected):
                return False
            expected = expected * value.size(d)
    return True


def lies_as(value: torch.Tensor | None, order: Sequence[int] = ()) -> bool:
    """Whether a fake tensor is known to be row-major, its dimensions in this order; () is torch's.

    One that isn't there may lie in any.
    """
    return value is None or is_row_major(value, order or range(value.dim()))


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes another one."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))
