"""Rotary position embedding: ``x * cos + turned(x) * sin``.

``turned`` puts the negated second half of the last dimension before the first. ``x`` is
``(..., D)`` of up to four dimensions with any strides; ``cos`` and ``sin`` broadcast to it. The
gradient is the same rotation backwards. Su et al., RoFormer, 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fuseboard_triton._math import narrow
from fuseboard_triton.kernels._launching import OPTIONS, power_of_two


@triton.jit
def _rotate(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    count,
    size1,
    size2,
    half,
    x0, x1, x2, x3,
    c0, c1, c2, c3,
    s0, s1, s2, s3,
    y0, y1, y2, y3,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    place = tl.arange(0, HALF)[None, :]
    mask = (row < count) & (place < half)
    c = row % size2
    b = (row // size2) % size1
    a = row // (size2 * size1)
    x_ptr += a * x0 + b * x1 + c * x2 + place * x3
    cos_ptr += a * c0 + b * c1 + c * c2 + place * c3
    sin_ptr += a * s0 + b * s1 + c * s2 + place * s3
    y_ptr += a * y0 + b * y1 + c * y2 + place * y3
    first = tl.load(x_ptr, mask=mask, other=0).to(tl.float32)
    second = tl.load(x_ptr + half * x3, mask=mask, other=0).to(tl.float32)
    cos1 = tl.load(cos_ptr, mask=mask, other=0).to(tl.float32)
    cos2 = tl.load(cos_ptr + half * c3, mask=mask, other=0).to(tl.float32)
    sin1 = tl.load(sin_ptr, mask=mask, other=0).to(tl.float32)
    sin2 = tl.load(sin_ptr + half * s3, mask=mask, other=0).to(tl.float32)
    if BACKWARD:
        one = first * cos1 + second * sin2
        other = second * cos2 - first * sin1
    else:
        one = first * cos1 - second * sin1
        other = second * cos2 + first * sin2
    tl.store(y_ptr, narrow(one, y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + half * y3, narrow(other, y_ptr.dtype.element_ty), mask=mask)


def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, strides: Sequence[int] | None = None
) -> torch.Tensor:
    """The rotated vectors, in the dtype that ``x`` and ``cos`` promote to.

    :param strides: those of the result; None means contiguous.
    """
    return _run(x, cos, sin, strides, backward=False)


def rotary_backward(
    grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, strides: Sequence[int] | None = None
) -> torch.Tensor:
    """The gradient of ``x``."""
    return _run(grad, cos, sin, strides, backward=True)


def _run(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    strides: Sequence[int] | None,
    backward: bool,
) -> torch.Tensor:
    dtype = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), sin.dtype)
    if strides is None:
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
    else:
        y = torch.empty_strided(x.shape, tuple(strides), dtype=dtype, device=x.device)
    if not y.numel():
        return y
    operands = [x, cos.expand(x.shape), sin.expand(x.shape), y]
    lead = (None,) * (4 - x.dim())
    shape = operands[0][lead].shape
    half = shape[3] // 2
    count = shape[0] * shape[1] * shape[2]
    block = power_of_two(half)
    rows = max(1024 // block, 1)
    steps = [step for tensor in operands for step in tensor[lead].stride()]
    _rotate[(-(-count // rows),)](
        *operands,
        count,
        shape[1],
        shape[2],
        half,
        *steps,
        BACKWARD=backward,
        ROWS=rows,
        HALF=block,
        num_warps=4,
        **OPTIONS,
    )
    return y


def turned(x: torch.Tensor) -> torch.Tensor:
    """The last dimension's second half, negated, before its first."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """What :func:`rotary` computes."""
    return x * cos + turned(x) * sin


def reference_backward(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """What :func:`rotary_backward` computes."""
    first, second = (grad * sin).chunk(2, -1)
    return grad * cos + torch.cat([second, -first], -1)
