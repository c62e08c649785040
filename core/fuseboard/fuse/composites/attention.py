"""Attention: torch's op for it, what that becomes on each device, and the board's own.

Formulas that are written out become the board's op before autograd
(:mod:`fuseboard.fuse.attention`), so that none is left to be found here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from fuseboard.contracts import Composite
from fuseboard.fuse.composites.definition import Reader, composite, meta, of_items
from fuseboard.fuse.patterns.matching import same_number
from fuseboard.ops.attention import attention as own_attention
from fuseboard.ops.attention_formula import scale_of
from fuseboard.torch_api.pattern_traces import arguments

aten = torch.ops.aten


def _attention(node: Node) -> Composite | None:
    """Of torch's ops, without dropout: that draws random numbers, each op its own."""
    named = dict(arguments(node))
    if named.get("dropout_p"):
        return None
    query, scale = named["query"], named.get("scale")
    width = meta(query).shape[-1]
    if scale is None:
        if not isinstance(width, int) or not width:
            return None
        scale = 1 / math.sqrt(width)
    given = {
        **{name: named[name] for name in ("query", "key", "value")},
        "mask": named.get("attn_mask", named.get("attn_bias")),
        "causal": named.get("is_causal", False),
        "scale": scale,
        # What torch's op becomes doesn't say it, and takes it all the same.
        "grouped": named.get("enable_gqa", False) or _has_fewer_heads(named["key"], query),
    }
    if not isinstance(node.meta["val"], list | tuple):
        return composite("attention", str(node.target), [node], given, {"y": node})
    return of_items("attention", node, given, ("y", "logsumexp"))


def _has_fewer_heads(key: Node, query: Node) -> bool:
    values = meta(key), meta(query)
    return all(one.dim() == 4 for one in values) and not same_number(*(v.shape[1] for v in values))


def _own(node: Node) -> Composite | None:
    """The board's op where it puts no mask on scores."""
    query, key, value, bias, *masks, steps = node.args
    if bias is not None or any(mask is not None for mask in masks):
        return None
    given = {
        **{"query": query, "key": key, "value": value, "mask": None, "causal": False},
        **{"scale": scale_of(str(steps)), "grouped": False},
    }
    return of_items("attention", node, given, ("y", "logsumexp"))


#: torch's op, and those that it becomes: on CPU, on CUDA, on devices of others.
_OPS = """
    scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
"""

READERS: dict[Any, Reader] = {
    **{getattr(aten, name).default: _attention for name in _OPS.split() if hasattr(aten, name)},
    own_attention: _own,
}
