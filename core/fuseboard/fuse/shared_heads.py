"""One token's attention where several heads share their keys and values, without copies of these.

Models write grouped attention by repeating each head of a cache for all that share it
(``repeat_kv`` of transformers), which copies the whole cache, several times larger, in each call.
Of a single token, the heads that share one are as good as rows of one head: each row is an
attention by itself.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.contracts import Fusion, GraphKind, Region
from fuseboard.fuse.writing import Writer
from fuseboard.hookspecs import hookimpl

aten = torch.ops.aten
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
#: What makes one dimension of two.
_JOINS = (aten._unsafe_view.default, aten.view.default)


@hookimpl
def fuseboard_fuse(
    graph: GraphModule, kind: GraphKind, region: Region | None
) -> list[Fusion] | None:
    """Offer to let heads that share keys and values be rows."""
    if region is not None or kind != "inference":
        return None
    found = []
    for node in graph.graph.find_nodes(op="call_function", target=_ATTENTION):
        if (shared := _shared(node)) is not None:
            found.append(
                Fusion("shared heads", (node.name,), partial(_write, graph, node, *shared))
            )
    return found


def _shared(node: Node) -> tuple[Node, Node] | None:
    """Keys and values as they were before they were repeated, in an attention of one token."""
    query, *both = node.args[:3]
    rest = dict(zip(("dropout_p", "is_causal"), node.args[3:], strict=False)) | node.kwargs
    if rest.get("is_causal") or rest.get("dropout_p"):
        return None
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
        return None  # the second result would have other sizes
    of_query, mask = _shape(query), rest.get("attn_mask")
    if len(of_query) != 4 or not _is_one(of_query[2]):
        return None
    if mask is not None and (
        len(of_mask := _shape(mask)) != 4 or not all(map(_is_one, of_mask[1:3]))
    ):
        return None  # each head has its own
    key, value = (_before_repeating(one) for one in both)
    if key is None or value is None or _shape(key)[1] != _shape(value)[1]:
        return None
    return key, value


def _before_repeating(node: Any) -> Node | None:
    """The tensor of shape (B, G, L, D) of which a node repeats each head, one after the other."""
    shape = _shape(node)
    if len(shape) != 4 or node.target not in _JOINS:
        return None
    copied = node.args[0]
    repeated = copied.args[0] if copied.target is aten.clone.default else copied
    if repeated.target is not aten.expand.default:
        return None
    apart = repeated.args[0]
    if apart.target is not aten.unsqueeze.default or apart.args[1] not in (2, -3):
        return None
    before: Any = apart.args[0]
    sizes = _shape(repeated)
    numbers = [*shape[:2], shape[3], *sizes[:3], sizes[4], *_shape(before)[:2]]
    if len(_shape(before)) != 4 or not all(type(size) is int for size in numbers):
        return None  # only a guard would tell
    batch, groups, times = sizes[:3]
    joined = (batch, groups * times, sizes[4])
    if _shape(before)[:2] != (batch, groups) or (*shape[:2], shape[3]) != joined:
        return None
    assert isinstance(before, Node)  # it has a shape
    return before


def _shape(node: Any) -> tuple[Any, ...]:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _is_one(size: Any) -> bool:
    return type(size) is int and size == 1


def _write(graph: GraphModule, node: Node, key: Node, value: Node) -> None:
    """Compute the same by heads as rows; results are laid out as the kernel's of one token are."""
    query = node.args[0]
    batch, heads, _, width = _shape(query)
    groups, of_value = _shape(key)[1], _shape(value)[3]
    write = Writer(graph, node).function
    whole = write(aten.clone.default, query, memory_format=torch.contiguous_format)
    rows = write(aten.view.default, whole, [batch, groups, heads // groups, width])
    made = write(_ATTENTION, rows, key, value, *node.args[3:], **node.kwargs)
    result = write(operator.getitem, made, 0)
    result = write(aten.clone.default, result, memory_format=torch.contiguous_format)
    result = write(aten.view.default, result, [batch, 1, heads, of_value])
    result = write(aten.transpose.int, result, 1, 2)
    for user in list(node.users):
        user.replace_all_uses_with(result)
        graph.graph.erase_node(user)
    graph.graph.erase_node(node)  # it counts as a draw, which nobody takes out for being unread
