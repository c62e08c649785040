"""Ops of several results of which one is read, as ops of one result: the faster ones.

Norms and attention are the board's composites, so that those that are written out are found, too.
What stands for them are ops of this plugin: torch's own, such as ``aten.layer_norm``, fall into
others when a graph that holds them is traced again, to decompose what is beside them.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

import fuseboard
from fuseboard_onnxruntime import _conditions
from fuseboard_onnxruntime._torch_internals import known_true

aten: Any = torch.ops.aten


def first_results(graph: GraphModule) -> tuple[str, ...]:
    """Attention without its logsumexp, norms without their statistics.

    :returns: how many there are of each, a note each for the report.
    """
    counts = Counter[str]()
    for found in composites(graph):
        counts[found.name] += 1
        target, args = _CALLS[found.name](**found.arguments)
        fuseboard.replace_composite(graph, found, target, args)
    return tuple(f"composite {name} ×{times}" for name, times in sorted(counts.items()))


def pools_without_indices(graph: Graph) -> None:
    """Pools of which nothing but the maxima is read, where none of them is negative.

    Once nothing is traced again: the op that this writes would have indices then.
    """
    pools = aten.max_pool2d_with_indices.default
    for node in graph.find_nodes(op="call_function", target=pools):
        if _only_first(node) and _is_never_negative(node.args[0]):
            _read_first(graph, node)


def composites(graph: GraphModule) -> list[fuseboard.Composite]:
    """Those that are written as one op."""
    return fuseboard.find_composites(graph, _CALLS.keys(), _fits)


def _fits(found: fuseboard.Composite) -> bool:
    """Whether nothing but the result is read, and ONNX has a form of it that is proven."""
    if found.results.keys() != {"y"}:
        return False
    if found.name == "attention":
        return (
            found.form == _ATTENTION and _conditions.attention(found.results["y"].args[0]) is None
        )
    x, dims = found.arguments["x"], found.arguments["dims"]
    if not all(isinstance(size, int) for size in x.meta["val"].shape[-dims:]):
        return False
    if found.form == str(aten.native_layer_norm.default):
        return True
    given = [value for value in found.arguments.values() if isinstance(value, Node)]
    values = [node.meta["val"] for node in (*given, found.results["y"])]
    if x.meta["val"].shape[-1] > _LONGEST_ROW:
        return False
    return all(one.dtype == torch.float32 and known_true(one.numel() > 0) for one in values)


#: Rows of which the kernels' sums are as near to float64 as eager's, within a factor of 2.
_LONGEST_ROW = 8192


#: What claims are made of.
_ATTENTION = str(aten._scaled_dot_product_flash_attention_for_cpu.default)


def _attention(
    query: Node, key: Node, value: Node, mask: Any, causal: bool, scale: float, grouped: bool
) -> tuple[Any, tuple[Any, ...]]:
    args = (query, key, value, mask, causal, scale, grouped)
    return torch.ops.fuseboard_onnxruntime.attention.default, args


def _layer_norm(x: Node, weight: Any, bias: Any, eps: float, dims: int) -> tuple[Any, Any]:
    return torch.ops.fuseboard_onnxruntime.layer_norm.default, (x, weight, bias, eps, dims)


def _rms_norm(x: Node, weight: Any, eps: float, dims: int) -> tuple[Any, Any]:
    return torch.ops.fuseboard_onnxruntime.rms_norm.default, (x, weight, eps, dims)


_CALLS = {"attention": _attention, "layer_norm": _layer_norm, "rms_norm": _rms_norm}


# --- what stands for composites -------------------------------------------------------------------


@torch.library.custom_op("fuseboard_onnxruntime::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    grouped: bool,
) -> torch.Tensor:
    """Of (N, H, L, E) and twice (N, H, S, E), in memory as eager's: by position, then by head.

    :param grouped: keys and values have fewer heads, each for as many of the queries', in order.
    """
    result = F.scaled_dot_product_attention(
        query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped
    )
    return result.transpose(1, 2).contiguous().transpose(1, 2)


@torch.library.custom_op("fuseboard_onnxruntime::layer_norm", mutates_args=())
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dims: int,
) -> torch.Tensor:
    """Over the last ``dims`` dimensions."""
    return F.layer_norm(x, x.shape[-dims:], weight, bias, eps)


@torch.library.custom_op("fuseboard_onnxruntime::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, dims: int) -> torch.Tensor:
    """Over the last ``dims`` dimensions."""
    return torch.rms_norm(x, x.shape[-dims:], weight, eps)


def _like_positions(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(query.transpose(1, 2).contiguous()).transpose(1, 2)


attention.register_fake(_like_positions)
layer_norm.register_fake(lambda x, weight, bias, eps, dims: torch.empty_like(x.contiguous()))
rms_norm.register_fake(lambda x, weight, eps, dims: torch.empty_like(x))


# --- pools ----------------------------------------------------------------------------------------


def _only_first(node: Node) -> bool:
    return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)


def _read_first(graph: Graph, node: Node) -> None:
    """A pool of elements of which none is negative, in its ONNX form without indices."""
    for item in list(node.users):
        with graph.inserting_before(item):
            new = graph.call_function(aten.max_pool2d.default, node.args)
        new.meta = dict(item.meta)
        item.replace_all_uses_with(new)
        graph.erase_node(item)
    graph.erase_node(node)


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
