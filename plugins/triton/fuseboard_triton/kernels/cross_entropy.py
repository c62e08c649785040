"""Cross entropy of logits and class numbers: log-softmax and its loss in one kernel.

``x`` is ``(M, V)`` and contiguous, ``target`` ``(M,)`` of int64. Rows whose target is
``ignore_index`` count for nothing. Maximum and sum of a row are found together (Milakov and
Gimelshein, Online normalizer calculation for softmax, 2018).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fuseboard_triton._math import exp, log, max_rows, narrow
from fuseboard_triton.kernels._launching import options_for, power_of_two

#: Columns that a program looks at in one step.
BLOCK = 4096


@triton.jit
def _online(x_ptr, width, BLOCK: tl.constexpr):
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
def _forward(
    x_ptr,
    target_ptr,
    loss_ptr,
    log_ptr,
    width,
    ignored,
    WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * width
    largest, total = _online(x_ptr, width, BLOCK)
    shift = log(total)
    one = tl.zeros([1], tl.int64)
    target = tl.load(target_ptr + row + one)
    counts = target != ignored
    inside = counts & (target >= 0) & (target < width)
    picked = tl.load(x_ptr + target, mask=inside, other=float("nan"))
    loss = tl.where(counts, -(picked.to(tl.float32) - largest - shift), 0.0)
    tl.store(loss_ptr + row + one, loss)
    if WRITE:
        place = tl.arange(0, BLOCK)
        for start in range(0, width, BLOCK):
            mask = start + place < width
            x = tl.load(x_ptr + start + place, mask=mask, other=0).to(tl.float32)
            result = narrow(x - largest - shift, log_ptr.dtype.element_ty)
            tl.store(log_ptr + row * width + start + place, result, mask=mask)


@triton.jit
def _backward(
    grad_ptr,
    total_ptr,
    log_ptr,
    target_ptr,
    dx_ptr,
    width,
    ignored,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    grad = tl.load(grad_ptr).to(tl.float32)
    if MEAN:
        grad = tl.div_rn(grad, tl.load(total_ptr).to(tl.float32))
    grad = tl.where(target != ignored, grad, 0.0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < width
    logs = tl.load(log_ptr + row * width + place, mask=mask, other=0).to(tl.float32)
    dx = grad * (exp(logs) - tl.where(place == target, 1.0, 0.0))
    tl.store(dx_ptr + row * width + place, narrow(dx, dx_ptr.dtype.element_ty), mask=mask)


def cross_entropy(
    x: torch.Tensor, target: torch.Tensor, ignore_index: int, mean: bool, write: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, how many rows count (in the dtype of ``x``), and the log-softmax.

    :param mean: whether the loss is divided by the rows that count.
    :param write: whether the log-softmax is needed; if not, it is ``x``.
    """
    rows, width = x.shape
    losses = torch.empty(rows, dtype=torch.float32, device=x.device)
    logs = torch.empty_like(x) if write else x
    block = min(power_of_two(width), BLOCK)
    if rows:
        _forward[(rows,)](
            x,
            target,
            losses,
            logs,
            width,
            ignore_index,
            WRITE=write,
            BLOCK=block,
            **options_for(block),
        )
    counted = (target != ignore_index).sum()
    loss = losses.sum() / counted if mean else losses.sum()
    return loss.to(x.dtype), counted.to(x.dtype), logs


def cross_entropy_backward(
    grad: torch.Tensor,
    logs: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    mean: bool,
    total: torch.Tensor,
) -> torch.Tensor:
    """The gradient of the logits.

    :param grad: of the loss, one number.
    :param logs: the log-softmax.
    :param total: how many rows count.
    """
    rows, width = logs.shape
    dx = torch.empty_like(logs)
    block = min(power_of_two(width), BLOCK)
    if rows and width:
        _backward[(rows, -(-width // block))](
            grad,
            total,
            logs,
            target,
            dx,
            width,
            ignore_index,
            MEAN=mean,
            BLOCK=block,
            **options_for(block),
        )
    return dx


def reference(
    x: torch.Tensor, target: torch.Tensor, ignore_index: int, mean: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`cross_entropy` computes."""
    logs = torch.log_softmax(x, -1)
    counts = target != ignore_index
    picked = logs.gather(1, target.where(counts, 0)[:, None])[:, 0]
    loss = -(picked.where(counts, 0)).sum()
    total = counts.sum().to(x.dtype)
    return (loss / total if mean else loss), total, logs


def reference_backward(
    grad: torch.Tensor,
    logs: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    mean: bool,
    total: torch.Tensor,
) -> torch.Tensor:
    """What :func:`cross_entropy_backward` computes."""
    counts = target != ignore_index
    hit = torch.nn.functional.one_hot(target.where(counts, 0), logs.shape[1])
    scale = (grad / total if mean else grad) * counts[:, None]
    return scale * (logs.exp() - hit)
