"""Layer norm and RMS norm, with a residual that is added first.

``(x - mean) * rstd * weight + bias`` and ``x * rstd * weight``. ``x`` is ``(..., N)`` and
contiguous, ``weight`` and ``bias`` are ``(N,)`` or None, N is at most ``LONGEST_ROW``. Variances
are taken of the differences from the mean, in a second look at the row in registers. Ba, Kiros and
Hinton, Layer Normalization, 2016; Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fuseboard_triton._math import narrow, rsqrt
from fuseboard_triton.kernels._launching import options_for, power_of_two, programs_for, rows_of

Tensor = torch.Tensor


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
    CENTRED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mask = place < width
    one = tl.zeros([1], tl.int32)
    x = tl.load(x_ptr + row * width + place, mask=mask, other=0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + row * width + place, mask=mask, other=0).to(tl.float32)
        total = narrow(x, sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + place, total, mask=mask)
        x = total.to(tl.float32)  # as eager reads it back
    if CENTRED:
        mean = tl.sum(x, 0, keep_dims=True) / width
        tl.store(mean_ptr + row + one, narrow(mean, mean_ptr.dtype.element_ty))
        x = tl.where(mask, x - mean, 0)
    rstd = rsqrt(tl.sum(x * x, 0, keep_dims=True) / width + eps)
    tl.store(rstd_ptr + row + one, narrow(rstd, rstd_ptr.dtype.element_ty))
    y = x * rstd
    if WEIGHT:
        y *= tl.load(weight_ptr + place, mask=mask, other=0).to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + place, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + row * width + place, narrow(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    rows,
    width,
    CENTRED: tl.constexpr,
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
        if CENTRED:
            x = tl.where(mask, x - tl.load(mean_ptr + row).to(tl.float32), 0)
        rstd = tl.load(rstd_ptr + row).to(tl.float32)
        hat = x * rstd
        scaled = grad * weight
        dx = scaled - hat * (tl.sum(scaled * hat, 0) / width)
        if CENTRED:
            dx -= tl.sum(scaled, 0) / width
            dbias += grad
        dx *= rstd
        tl.store(dx_ptr + start + place, narrow(dx, dx_ptr.dtype.element_ty), mask=mask)
        dweight += grad * hat
    tl.store(dweight_ptr + first * width + place, dweight, mask=mask)
    if CENTRED:
        tl.store(dbias_ptr + first * width + place, dbias, mask=mask)


# --- forward --------------------------------------------------------------------------------------


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    stats: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised rows, and each one's mean and ``rsqrt(var + eps)``, ``(..., 1)``.

    :param stats: the dtype of these two.
    """
    return add_layer_norm(x, None, weight, bias, eps, stats)[:3]


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    stats: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Layer norm of ``x + residual``, and the sum itself."""
    mean = torch.empty((*x.shape[:-1], 1), dtype=stats, device=x.device)
    y, rstd, total = _run(x, residual, weight, bias, eps, mean, stats)
    return y, mean, rstd, total


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised rows, and ``rsqrt(mean(x**2) + eps)`` of each in float32, ``(..., 1)``."""
    return add_rms_norm(x, None, weight, eps)[:2]


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm of ``x + residual``, and the sum itself."""
    return _run(x, residual, weight, None, eps, None, torch.float32)


def _run(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mean: Tensor | None,
    stats: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised rows, ``rstd``, and what was normalised.

    :param mean: is written to; None for an RMS norm.
    """
    rows, width = rows_of(x)
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=stats, device=x.device)
    block = power_of_two(width)
    if rows:
        _forward[(rows,)](
            x,
            x if residual is None else residual,
            x if weight is None else weight,
            x if bias is None else bias,
            y,
            rstd if mean is None else mean,
            rstd,
            total,
            width,
            eps,
            CENTRED=mean is not None,
            RESIDUAL=residual is not None,
            WEIGHT=weight is not None,
            BIAS=bias is not None,
            BLOCK=block,
            **options_for(block),
        )
    return y, rstd, total


# --- backward -------------------------------------------------------------------------------------


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``x``, of ``weight`` and of ``bias``, in the dtype of ``x``."""
    dx, (dweight, dbias) = _run_backward(grad, x, weight, mean, rstd)
    return dx, dweight.to(x.dtype), dbias.to(x.dtype)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of ``x`` and of ``weight``, each in its dtype."""
    dx, (dweight,) = _run_backward(grad, x, weight, None, rstd)
    return dx, None if weight is None else dweight.to(weight.dtype)


def _run_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The gradient of ``x``, and in float32 those of weight and bias.

    :param mean: None for an RMS norm, which has no bias.
    """
    rows, width = rows_of(x)
    dx = torch.empty_like(x)
    programs = programs_for(rows, x.device)
    partial = torch.empty(
        (1 if mean is None else 2, programs, width), dtype=torch.float32, device=x.device
    )
    block = power_of_two(width)
    if rows:
        _backward[(programs,)](
            grad,
            x,
            x if weight is None else weight,
            rstd if mean is None else mean,
            rstd,
            dx,
            partial[0],
            partial[-1],
            rows,
            width,
            CENTRED=mean is not None,
            WEIGHT=weight is not None,
            BLOCK=block,
            **options_for(block),
        )
    return dx, [part.sum(0) for part in partial]  # each in memory of its own


# --- references -----------------------------------------------------------------------------------


def layer_norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`layer_norm` computes."""
    mean = x.mean(-1, keepdim=True)
    y, rstd = rms_norm_reference(x - mean, weight, eps)
    return (y if bias is None else y + bias), mean, rstd


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """What :func:`rms_norm` computes."""
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = x * rstd
    return (y if weight is None else y * weight), rstd


def layer_norm_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`layer_norm_backward` computes."""
    hat = (x - mean) * rstd
    scaled = grad if weight is None else grad * weight
    along = (scaled * hat).mean(-1, keepdim=True)
    dx = (scaled - scaled.mean(-1, keepdim=True) - hat * along) * rstd
    width = x.shape[-1]
    return dx, (grad * hat).reshape(-1, width).sum(0), grad.reshape(-1, width).sum(0)


def rms_norm_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor | None]:
    """What :func:`rms_norm_backward` computes."""
    hat = x * rstd
    scaled = grad if weight is None else grad * weight
    dx = (scaled - hat * (scaled * hat).mean(-1, keepdim=True)) * rstd
    dweight = None if weight is None else (grad * hat).reshape(-1, x.shape[-1]).sum(0)
    return dx, dweight
