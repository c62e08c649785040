"""Softmax and cross entropy over the last axis, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fuseboard_triton.kernels import cross_entropy, softmax
from fuseboard_triton.patterns.nodes import (
    Match,
    calls,
    is_contiguous,
    is_last,
    is_plain,
    items,
    meta,
    one_reader,
)

aten = torch.ops.aten


def _softmax(node: Node) -> Match | None:
    if not calls(node, aten._softmax.default):
        return None
    x, dim, half_to_float = node.args
    if half_to_float or not is_last(dim, x) or not is_plain(x, node):
        return None
    return Match("softmax", _softmax_kernel, (x,), (node,), {0: node})


def _softmax_kernel(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (softmax.softmax(x),)


def _softmax_backward(node: Node) -> Match | None:
    if not calls(node, aten._softmax_backward_data.default):
        return None
    grad, y, dim, _ = node.args
    if not is_last(dim, y) or not is_plain(grad, y, node):
        return None
    return Match("softmax_backward", _softmax_grad, (grad, y), (node,), {0: node})


def _softmax_grad(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (softmax.softmax_backward(grad, y),)


def _cross_entropy(node: Node) -> Match | None:
    """Log-softmax, then the loss of class numbers."""
    if not calls(node, aten.nll_loss_forward.default):
        return None
    logs, target, weight, reduction, ignored = node.args
    if not calls(logs, aten._log_softmax.default) or weight is not None or reduction == 0:
        return None
    x, dim, half_to_float = logs.args
    if half_to_float or not is_last(dim, x) or meta(x).dim() != 2 or not is_plain(x, logs):
        return None
    if meta(target).dtype != torch.int64 or not is_contiguous(meta(target)):
        return None
    found = items(node)
    write = len(logs.users) > 1
    args = (x, target, ignored, reduction == 1, write)
    outputs = {**found, 2: logs} if write else found
    nodes = (logs, node, *found.values())
    return Match("cross_entropy", cross_entropy.cross_entropy, args, nodes, outputs, only=True)


def _cross_entropy_backward(node: Node) -> Match | None:
    if not calls(node, aten._log_softmax_backward_data.default):
        return None
    inner, logs, dim, _ = node.args
    if not calls(inner, aten.nll_loss_backward.default) or not one_reader(inner):
        return None
    grad, picked, target, weight, reduction, ignored, total = inner.args
    if weight is not None or reduction == 0 or not is_last(dim, logs) or meta(logs).dim() != 2:
        return None
    if _undetached(picked) is not _undetached(logs) or not is_plain(logs, node):
        return None
    if meta(target).dtype != torch.int64 or not is_contiguous(meta(target)):
        return None
    args = (grad, logs, target, ignored, reduction == 1, total)
    return Match("cross_entropy_backward", _loss_grad, args, (inner, node), {0: node}, only=True)


def _undetached(node: Any) -> Any:
    while calls(node, aten.detach.default, aten.alias.default):
        node = node.args[0]
    return node


def _loss_grad(*args: Any) -> tuple[torch.Tensor, ...]:
    return (cross_entropy.cross_entropy_backward(*args),)


WHOLE = (_cross_entropy, _cross_entropy_backward)
FINDERS = (_softmax, _softmax_backward)
