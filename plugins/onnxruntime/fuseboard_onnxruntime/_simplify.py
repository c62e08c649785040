"""Ops of several results of which one is read, as ops of one result: the faster ones."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Graph, Node

aten: Any = torch.ops.aten


def first_results(graph: Graph) -> None:
    """Attention without its logsumexp, layer norm without its statistics, pools without indices."""
    for node in list(graph.nodes):
        make = _FORMS.get(node.target) if node.op == "call_function" else None
        if make is None or not _only_first(node):
            continue
        for item in list(node.users):
            with graph.inserting_before(item):
                new = make(graph, node)
            if new is None:
                break
            new.meta = dict(item.meta)
            item.replace_all_uses_with(new)
            graph.erase_node(item)
        if not node.users:
            graph.erase_node(node)


def _only_first(node: Node) -> bool:
    return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)


def _attention(graph: Graph, node: Node) -> Node:
    query, key, value, *rest = node.args
    _, is_causal = (*rest, *(0.0, False)[len(rest) :])
    size = query.meta["val"].shape[-1]  # type: ignore[union-attr]
    scale = node.kwargs.get("scale")
    given = {
        "attn_mask": node.kwargs.get("attn_mask"),
        "is_causal": is_causal or node.kwargs.get("is_causal", False),
        "scale": 1 / math.sqrt(size) if scale is None else scale,
    }
    return graph.call_function(
        aten.scaled_dot_product_attention.default, (query, key, value), given
    )


def _layer_norm(graph: Graph, node: Node) -> Node:
    return graph.call_function(aten.layer_norm.default, node.args)


def _max_pool(graph: Graph, node: Node) -> Node | None:
    """The form of elements of which none is negative; None where some may be."""
    if not _is_never_negative(node.args[0]):
        return None
    return graph.call_function(aten.max_pool2d.default, node.args)


def _is_never_negative(value: Any) -> bool:
    """Whether no element is below 0; NaN may be among them."""
    pending, seen = [value], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target in _KEEP_SIGNS:
            pending.extend(node.all_input_nodes)
        elif node.target not in _NEVER_NEGATIVE:
            return False
    return True


_NEVER_NEGATIVE = frozenset(
    {
        *(aten.relu.default, aten.sigmoid.default, aten.exp.default, aten.abs.default),
        *(aten.hardsigmoid.default, aten._softmax.default),
    }
)
_KEEP_SIGNS = frozenset(
    {
        *(operator.getitem, aten.max_pool2d_with_indices.default, aten.max_pool2d.default),
        *(aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default, aten.cat.default),
        *(aten.view.default, aten.permute.default, aten.slice.Tensor, aten.clone.default),
    }
)

_FORMS = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten.native_layer_norm.default: _layer_norm,
    aten.max_pool2d_with_indices.default: _max_pool,
}
