"""Softmax over the last dimension, and its gradient.

``x`` is ``(..., N)`` and contiguous. A row of up to ``LONGEST_ROW`` elements is read once; of a
longer one maximum and sum are found together in one pass (Milakov and Gimelshein, Online normalizer
calculation for softmax, 2018), and a second pass writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fuseboard_triton._math import exp, max_rows, narrow
from fuseboard_triton.kernels._launching import LONGEST_ROW, options_for, power_of_two, rows_of


@triton.jit
def _forward(x_ptr, y_ptr, width, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    if WHOLE:
        mask = place < width
        x = tl.load(x_ptr + row * width + place, mask=mask, other=float("-inf")).to(tl.float32)
        powers = exp(x - max_rows(x, 0))
        powers = tl.where(mask, powers, 0)
        y = tl.div_rn(powers, tl.sum(powers, 0, keep_dims=True))
        tl.store(y_ptr + row * width + place, narrow(y, y_ptr.dtype.element_ty), mask=mask)
    else:
        largest, total = online(x_ptr + row * width, width, BLOCK)
        for start in range(0, width, BLOCK):
            mask = start + place < width
            x = tl.load(x_ptr + row * width + start + place, mask=mask, other=0).to(tl.float32)
            y = tl.div_rn(exp(x - largest), total)
            tl.store(
                y_ptr + row * width + start + place, narrow(y, y_ptr.dtype.element_ty), mask=mask
            )


@triton.jit
def online(x_ptr, width, BLOCK: tl.constexpr):
    """The largest of a row and the sum of ``exp(x - largest)``, each ``[1]``, in one pass."""
    place = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        mask = start + place < width
        x = tl.load(x_ptr + start + place, mask=mask, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
        # Nothing but -inf so far: the difference would be NaN.
        before = tl.where(largest == float("-inf"), 0.0, exp(largest - new))
        own = tl.where(x == float("-inf"), 0.0, exp(x - new))
        total = total * before + own
        largest = new
    top = max_rows(largest, 0) + tl.zeros([1], tl.float32)
    scaled = tl.where(largest == float("-inf"), 0.0, total * exp(largest - top))
    summed = tl.sum(scaled, 0, keep_dims=True)
    # A row of -inf alone has no softmax.
    return top, tl.where(top == float("-inf"), float("nan"), summed)


@triton.jit
def _backward(grad_ptr, y_ptr, dx_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        mask = start + place < width
        y = tl.load(y_ptr + row * width + start + place, mask=mask, other=0).to(tl.float32)
        grad = tl.load(grad_ptr + row * width + start + place, mask=mask, other=0).to(tl.float32)
        total += y * grad
    along = tl.sum(total, 0, keep_dims=True)
    for start in range(0, width, BLOCK):
        mask = start + place < width
        y = tl.load(y_ptr + row * width + start + place, mask=mask, other=0).to(tl.float32)
        grad = tl.load(grad_ptr + row * width + start + place, mask=mask, other=0).to(tl.float32)
        dx = y * grad - y * along
        tl.store(
            dx_ptr + row * width + start + place, narrow(dx, dx_ptr.dtype.element_ty), mask=mask
        )


def softmax(x: torch.Tensor, longest: int = LONGEST_ROW) -> torch.Tensor:
    """Softmax of each row.

    :param longest: longer rows take two passes.
    """
    rows, width = rows_of(x)
    y = torch.empty_like(x)
    whole = width <= longest
    block = power_of_two(width) if whole else min(power_of_two(longest), 4096)
    if rows:
        _forward[(rows,)](x, y, width, WHOLE=whole, BLOCK=block, **options_for(block))
    return y


def softmax_backward(
    grad: torch.Tensor, y: torch.Tensor, longest: int = LONGEST_ROW
) -> torch.Tensor:
    """The gradient of ``x``, from that of the result and the result ``y``."""
    rows, width = rows_of(y)
    dx = torch.empty_like(y)
    block = min(power_of_two(width), 4096, power_of_two(longest))
    if rows:
        _backward[(rows,)](grad, y, dx, width, BLOCK=block, **options_for(block))
    return dx


def reference(x: torch.Tensor) -> torch.Tensor:
    """What :func:`softmax` computes."""
    powers = torch.exp(x - x.amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True)


def reference_backward(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What :func:`softmax_backward` computes."""
    return y * grad - y * (y * grad).sum(-1, keepdim=True)
