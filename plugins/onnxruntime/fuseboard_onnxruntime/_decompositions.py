"""Ops without an ONNX form that can be trusted, in terms of others that have one.

What these functions bring is held against :mod:`fuseboard_onnxruntime._forms` when an op is
claimed, and again when a region is converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule

import fuseboard
from fuseboard_onnxruntime import _torch_internals
from fuseboard_onnxruntime._identities import drop_identities
from fuseboard_onnxruntime._ops import overloads

aten: Any = torch.ops.aten

#: By torch's own decompositions. ``_native_batch_norm_legit_functional`` and ``nll_loss_forward``
#: have a form in torch's ONNX library, which ignores the training flag and the total weight.
_BY_TORCH = """
    native_layer_norm_backward gelu_backward threshold_backward tanh_backward sigmoid_backward
    silu_backward hardtanh_backward leaky_relu_backward _softmax_backward_data
    _log_softmax_backward_data native_batch_norm_backward _native_batch_norm_legit_functional
    nll_loss_forward nll_loss_backward select_backward slice_backward
    squeeze.dims var_mean.correction std.correction var.correction frac mish addcdiv addcmul
    lerp.Scalar lerp.Tensor mse_loss rsub.Scalar baddbmm logsumexp
"""


@cache
def table() -> dict[Any, Callable[..., Any]]:
    """Op → what it decomposes into."""
    return {**_torch_internals.decompositions(overloads(aten, _BY_TORCH)), **_OWN}


def decompose(graph: GraphModule) -> GraphModule:
    """The graph without ops that have to be decomposed, and without those that change nothing.

    :param graph: it is changed: decomposed values may lie otherwise in memory, so views of them
        become reshapes.
    """
    _retarget(graph, aten.view.default, aten.reshape.default)
    graph = fuseboard.decompose(graph, table())
    _retarget(graph, aten.reshape.default, aten.view.default)  # whose ONNX form allows size 0
    drop_identities(graph.graph)
    return graph


def _retarget(graph: GraphModule, old: Any, new: Any) -> None:
    for node in graph.graph.find_nodes(op="call_function", target=old):
        node.target = new


# --- own ones -------------------------------------------------------------------------------------


def adaptive_average(value: torch.Tensor, output_size: Any) -> torch.Tensor:
    """Of (N, C, H, W) the mean over H and W: the size is 1 by 1."""
    return value.mean((-2, -1), keepdim=True)


def attention_with_logsumexp(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as one reads it, with the logarithm of the sum that softmax divides by.

    :param query: (N, H, L, E); ``key`` (N, H, S, E), ``value`` (N, H, S, E).
    :returns: (N, H, L, E), which lies in memory as (N, L, H, E); (N, H, L).
    """
    scores = _scores(query, key, is_causal, attn_mask, scale)
    total = torch.logsumexp(scores, -1)
    weights = _weights(scores, total)
    # In memory it lies as eager's: by position, then by head.
    result = (weights @ value).transpose(1, 2).contiguous().transpose(1, 2)
    return result, total


def attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of attention, from what the forward kept (FlashAttention-2, algorithm 2)."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = _scores(query, key, is_causal, attn_mask, scale)
    weights = _weights(scores, logsumexp)
    grad_weights = grad_out @ value.transpose(-2, -1)
    delta = (grad_out * out).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - delta) * factor
    return (
        grad_scores @ key,
        grad_scores.transpose(-2, -1) @ query,
        weights.transpose(-2, -1) @ grad_out,
    )


def _weights(scores: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Softmax of the scores; 0 where nothing may be looked at, as eager's kernel has it."""
    weights = torch.exp(scores - total.unsqueeze(-1))
    return torch.where((scores == -math.inf), 0.0, weights)


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    is_causal: bool,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.transpose(-2, -1)) * factor
    if is_causal:
        rows = torch.arange(query.shape[-2], device=query.device).unsqueeze(-1)
        later = torch.arange(key.shape[-2], device=query.device) > rows
        scores = scores.masked_fill(later, -math.inf)
    if mask is not None:
        scores = scores + mask
    return scores


_OWN: dict[Any, Callable[..., Any]] = {
    **fuseboard.OWN_OPS,
    aten._adaptive_avg_pool2d.default: adaptive_average,
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention_with_logsumexp,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
}
