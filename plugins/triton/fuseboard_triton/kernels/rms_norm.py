"""RMS norm, with a residual that is added first: ``x * rsqrt(mean(x**2) + eps) * weight``.

``x`` is ``(..., N)`` and contiguous, ``weight`` ``(N,)`` or None, N at most ``LONGEST_ROW``.
Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fuseboard_triton._math import narrow, rsqrt
from fuseboard_triton.kernels._launching import options_for, power_of_two, programs_for, rows_of


@triton.jit
def _forward(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    sum_ptr,
    width,
    eps,
    RESIDUAL: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mask = place < width
    x = tl.load(x_ptr + row * width + place, mask=mask, other=0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + row * width + place, mask=mask, other=0).to(tl.float32)
        total = narrow(x, sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + place, total, mask=mask)
        x = total.to(tl.float32)  # as eager reads it back
    rstd = rsqrt(tl.sum(x * x, 0, keep_dims=True) / width + eps)
    y = x * rstd
    if WEIGHT:
        y *= tl.load(weight_ptr + place, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + row * width + place, narrow(y, y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row + tl.zeros([1], tl.int32), rstd)


@triton.jit
def _backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    width,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    mask = place < width
    weight = tl.full([BLOCK], 1, tl.float32)
    if WEIGHT:
        weight = tl.load(weight_ptr + place, mask=mask, other=0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    for row in range(first, rows, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * width
        x = tl.load(x_ptr + start + place, mask=mask, other=0).to(tl.float32)
        grad = tl.load(grad_ptr + start + place, mask=mask, other=0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row).to(tl.float32)
        hat = x * rstd
        scaled = grad * weight
        dx = (scaled - hat * (tl.sum(scaled * hat, 0) / width)) * rstd
        tl.store(dx_ptr + start + place, narrow(dx, dx_ptr.dtype.element_ty), mask=mask)
        dweight += grad * hat
    if WEIGHT:
        tl.store(partial_ptr + first * width + place, dweight, mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised rows, and ``rsqrt(mean(x**2) + eps)`` of each in float32, ``(..., 1)``."""
    y, rstd, _ = _run(x, None, weight, eps)
    return y, rstd


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMS norm of ``x + residual``, and the sum itself."""
    return _run(x, residual, weight, eps)


def _run(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, width = rows_of(x)
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    block = power_of_two(width)
    if rows:
        _forward[(rows,)](
            x,
            x if residual is None else residual,
            x if weight is None else weight,
            y,
            rstd,
            total,
            width,
            eps,
            RESIDUAL=residual is not None,
            WEIGHT=weight is not None,
            BLOCK=block,
            **options_for(block),
        )
    return y, rstd, total


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of ``x`` and of ``weight``, each in its dtype."""
    rows, width = rows_of(x)
    dx = torch.empty_like(x)
    programs = programs_for(rows, x.device)
    partial = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    block = power_of_two(width)
    if rows:
        _backward[(programs,)](
            grad,
            x,
            x if weight is None else weight,
            rstd,
            dx,
            partial,
            rows,
            width,
            WEIGHT=weight is not None,
            BLOCK=block,
            **options_for(block),
        )
    return dx, None if weight is None else partial.sum(0).to(weight.dtype)


def reference(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`rms_norm` computes."""
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = x * rstd
    return (y if weight is None else y * weight), rstd


def reference_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What :func:`rms_norm_backward` computes."""
    hat = x * rstd
    scaled = grad if weight is None else grad * weight
    dx = (scaled - hat * (scaled * hat).mean(-1, keepdim=True)) * rstd
    dweight = None if weight is None else (grad * hat).reshape(-1, x.shape[-1]).sum(0)
    return dx, dweight
