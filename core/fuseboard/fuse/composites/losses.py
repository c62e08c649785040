"""Cross entropy of class numbers, and its gradient: log-softmax with the loss that reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fuseboard.contracts import Composite
from fuseboard.fuse.composites.definition import (
    Reader,
    calls,
    composite,
    is_last,
    items,
    meta,
    named_items,
)
from fuseboard.fuse.patterns.form import seen_through
from fuseboard.torch_api.pattern_traces import arguments

aten = torch.ops.aten

_REDUCTIONS = ("none", "mean", "sum")


def _cross_entropy(node: Node) -> Composite | None:
    logs, target, weight, reduction, ignored = (value for _, value in arguments(node))
    if not _is_log_softmax(logs) or meta(logs).dim() != 2:
        return None
    results = named_items(node, "loss", "total_weight")
    if results is None:
        return None
    given = {
        "logits": logs.args[0],
        "target": target,
        "weight": weight,
        "reduction": _REDUCTIONS[reduction],
        "ignore_index": ignored,
    }
    nodes = [logs, node, *items(node).values()]
    form = str(node.target)
    return composite("cross_entropy", form, nodes, given, {**results, "log_probabilities": logs})


def _is_log_softmax(node: Any) -> bool:
    if not calls(node, aten._log_softmax.default):
        return False
    x, dim, half_to_float = node.args
    return not half_to_float and is_last(dim, x)


def _cross_entropy_backward(node: Node) -> Composite | None:
    inner, logs, dim, dtype = (value for _, value in arguments(node))
    if not calls(inner, aten.nll_loss_backward.default) or not is_last(dim, logs):
        return None
    grad, picked, target, weight, reduction, ignored, total = (v for _, v in arguments(inner))
    same = seen_through(picked) is seen_through(logs)
    if not same or meta(logs).dim() != 2 or dtype != meta(logs).dtype:
        return None
    given = {
        "grad": grad,
        "log_probabilities": logs,
        "target": target,
        "weight": weight,
        "reduction": _REDUCTIONS[reduction],
        "ignore_index": ignored,
        "total_weight": total,
    }
    form = str(node.target)
    return composite("cross_entropy_backward", form, [inner, node], given, {"grad_logits": node})


READERS: dict[Any, Reader] = {
    aten.nll_loss_forward.default: _cross_entropy,
    aten._log_softmax_backward_data.default: _cross_entropy_backward,
}
