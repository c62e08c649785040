"""Gated activations: ``act(gate) * up`` with silu (SwiGLU) or gelu (GeGLU).

``gate`` and ``up`` are of one shape ``(..., N)`` and contiguous along N; leading dimensions may be
strided as those of halves of one projection are. Shazeer, GLU Variants Improve Transformer, 2020.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fuseboard_triton._math import erf, exp, narrow, tanh
from fuseboard_triton.kernels._launching import OPTIONS, power_of_two

Activation = Literal["silu", "gelu", "gelu_tanh"]

_CODES = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit
def _activation(x, ACT: tl.constexpr):
    """The activation and its derivative."""
    if ACT == 0:
        s = 1.0 / (1.0 + exp(-x))
        value = x * s
        slope = s * (1.0 + x * (1.0 - s))
    elif ACT == 1:
        cdf = 0.5 * (1.0 + erf(x * 0.7071067811865476))
        value = x * cdf
        slope = cdf + x * exp(-0.5 * x * x) * 0.3989422804014327
    else:
        t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        value = 0.5 * x * (1.0 + t)
        inner = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
    return value, slope


@triton.jit
def _forward(
    gate_ptr, up_ptr, y_ptr, gate_step, up_step, width, ACT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < width
    gate = tl.load(gate_ptr + row * gate_step + place, mask=mask, other=0).to(tl.float32)
    up = tl.load(up_ptr + row * up_step + place, mask=mask, other=0).to(tl.float32)
    value, _ = _activation(gate, ACT)
    y = value * up
    tl.store(y_ptr + row * width + place, narrow(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    grad_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    gate_step,
    up_step,
    width,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < width
    grad = tl.load(grad_ptr + row * width + place, mask=mask, other=0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_step + place, mask=mask, other=0).to(tl.float32)
    up = tl.load(up_ptr + row * up_step + place, mask=mask, other=0).to(tl.float32)
    value, slope = _activation(gate, ACT)
    dgate = grad * up * slope
    dup = grad * value
    tl.store(dgate_ptr + row * width + place, narrow(dgate, dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + row * width + place, narrow(dup, dup_ptr.dtype.element_ty), mask=mask)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``(..., N)`` as ``(M, N)``, contiguous along N."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _grid(rows: torch.Tensor) -> tuple[tuple[int, int], int]:
    block = min(power_of_two(rows.shape[1]), 1024)
    return (rows.shape[0], -(-rows.shape[1] // block)), block


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``act(gate) * up``, contiguous."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel():
        g, u = _rows(gate), _rows(up)
        grid, block = _grid(g)
        _forward[grid](
            g,
            u,
            y,
            g.stride(0),
            u.stride(0),
            g.shape[1],
            ACT=_CODES[activation],
            BLOCK=block,
            num_warps=4,
            **OPTIONS,
        )
    return y


def gated_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of ``gate`` and of ``up``, contiguous."""
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    if grad.numel():
        g, u = _rows(gate), _rows(up)
        grid, block = _grid(g)
        _backward[grid](
            grad.contiguous(),
            g,
            u,
            dgate,
            dup,
            g.stride(0),
            u.stride(0),
            g.shape[1],
            ACT=_CODES[activation],
            BLOCK=block,
            num_warps=4,
            **OPTIONS,
        )
    return dgate, dup


def _act(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def reference(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """What :func:`gated` computes."""
    return _act(gate, activation) * up


def reference_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`gated_backward` computes, by autograd."""
    with torch.enable_grad():
        gate, up = (t.detach().requires_grad_() for t in (gate, up))
        return torch.autograd.grad(reference(gate, up, activation), (gate, up), grad)
