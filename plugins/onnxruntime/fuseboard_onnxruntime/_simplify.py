"""Ops of several results of which one is read, as ops of one result: ONNX Runtime fuses these."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Graph, Node

aten: Any = torch.ops.aten


def first_results(graph: Graph) -> None:
    """Attention without its logsumexp, layer norm without its statistics."""
    for node in list(graph.nodes):
        make = _FORMS.get(node.target) if node.op == "call_function" else None
        if make is None or not _only_first(node):
            continue
        for item in list(node.users):
            with graph.inserting_before(item):
                new = make(graph, node)
            new.meta = dict(item.meta)
            item.replace_all_uses_with(new)
            graph.erase_node(item)
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


_FORMS = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten.native_layer_norm.default: _layer_norm,
}
