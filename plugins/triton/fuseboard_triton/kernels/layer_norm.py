"""Layer norm, with a residual that is added first: ``(x - mean) * rstd * weight + bias``.

``x`` is ``(..., N)`` and contiguous, ``weight`` and ``bias`` ``(N,)`` or None, N at most
``LONGEST_ROW``. The variance is taken of the differences from the mean, in a second look at the row
in registers. Ba, Kiros and Hinton, Layer Normalization, 2016.
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
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    sum_ptr,
    width,
    eps,
    RESIDUAL: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
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
    mean = tl.sum(x, 0, keep_dims=True) / width
    centred = tl.where(mask, x - mean, 0)
    rstd = rsqrt(tl.sum(centred * centred, 0, keep_dims=True) / width + eps)
    y = centred * rstd
    if WEIGHT:
        y *= tl.load(weight_ptr + place, mask=mask, other=0).to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + place, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + row * width + place, narrow(y, y_ptr.dtype.element_ty), mask=mask)
    one = tl.zeros([1], tl.int32)
    tl.store(mean_ptr + row + one, narrow(mean, mean_ptr.dtype.element_ty))
    tl.store(rstd_ptr + row + one, narrow(rstd, rstd_ptr.dtype.element_ty))


@triton.jit
def _backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
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
    dbias = tl.zeros([BLOCK], tl.float32)
    for row in range(first, rows, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * width
        x = tl.load(x_ptr + start + place, mask=mask, other=0).to(tl.float32)
        grad = tl.load(grad_ptr + start + place, mask=mask, other=0).to(tl.float32)
        mean = tl.load(mean_ptr + row).to(tl.float32)
        rstd = tl.load(rstd_ptr + row).to(tl.float32)
        hat = tl.where(mask, (x - mean) * rstd, 0)
        scaled = grad * weight
        along = tl.sum(scaled * hat, 0) / width
        dx = (scaled - tl.sum(scaled, 0) / width - hat * along) * rstd
        tl.store(dx_ptr + start + place, narrow(dx, dx_ptr.dtype.element_ty), mask=mask)
        dweight += grad * hat
        dbias += grad
    tl.store(partial_ptr + 2 * first * width + place, dweight, mask=mask)
    tl.store(partial_ptr + (2 * first + 1) * width + place, dbias, mask=mask)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    stats: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The normalised rows, and each one's mean and ``rsqrt(var + eps)``, ``(..., 1)``.

    :param stats: the dtype of these two.
    """
    return _run(x, None, weight, bias, eps, stats)[:3]


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    stats: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layer norm of ``x + residual``, and the sum itself."""
    return _run(x, residual, weight, bias, eps, stats)


def _run(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    stats: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, width = rows_of(x)
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    mean, rstd = (torch.empty((*x.shape[:-1], 1), dtype=stats, device=x.device) for _ in range(2))
    block = power_of_two(width)
    if rows:
        _forward[(rows,)](
            x,
            x if residual is None else residual,
            x if weight is None else weight,
            x if bias is None else bias,
            y,
            mean,
            rstd,
            total,
            width,
            eps,
            RESIDUAL=residual is not None,
            WEIGHT=weight is not None,
            BIAS=bias is not None,
            BLOCK=block,
            **options_for(block),
        )
    return y, mean, rstd, total


def layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of ``x``, of ``weight`` and of ``bias``, in the dtype of ``x``."""
    rows, width = rows_of(x)
    dx = torch.empty_like(x)
    programs = programs_for(rows, x.device)
    partial = torch.empty((programs, 2, width), dtype=torch.float32, device=x.device)
    block = power_of_two(width)
    if rows:
        _backward[(programs,)](
            grad,
            x,
            x if weight is None else weight,
            mean,
            rstd,
            dx,
            partial,
            rows,
            width,
            WEIGHT=weight is not None,
            BLOCK=block,
            **options_for(block),
        )
    dweight, dbias = partial.sum(0).to(x.dtype)
    return dx, dweight.clone(), dbias.clone()


def reference(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`layer_norm` computes."""
    mean = x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
    y = (x - mean) * rstd
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), mean, rstd


def reference_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`layer_norm_backward` computes."""
    hat = (x - mean) * rstd
    scaled = grad if weight is None else grad * weight
    along = (scaled * hat).mean(-1, keepdim=True)
    dx = (scaled - scaled.mean(-1, keepdim=True) - hat * along) * rstd
    width = x.shape[-1]
    return dx, (grad * hat).reshape(-1, width).sum(0), grad.reshape(-1, width).sum(0)
