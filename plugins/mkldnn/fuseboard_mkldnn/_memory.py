"""Fewer copies, views and allocations; the numbers stay the same."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard_mkldnn import _ops
from fuseboard_mkldnn._exact import CONVOLUTION, CONVOLUTION_ADD
from fuseboard_mkldnn._graph import (
    VIEWS,
    argument,
    aten,
    calls,
    has_strides_of,
    is_channels_last,
    is_contiguous,
    is_plain_clone,
    is_view,
    same_sizes,
    tensor,
)
from fuseboard_mkldnn._pointwise import IN_PLACE, POST_OPS, post_op

pointwise = torch.ops.mkldnn._linear_pointwise

#: Ops whose result is always memory of its own.
FRESH = frozenset(
    {
        CONVOLUTION,
        CONVOLUTION_ADD,
        pointwise.default,
        pointwise.binary,
        aten.add.Tensor,
        aten.addmm.default,
        aten.addmv.default,
        aten.bmm.default,
        aten.convolution.default,
        aten.linear.default,
        aten.mm.default,
        aten.mul.Tensor,
        aten.mv.default,
        aten.sub.Tensor,
        *([_ops.overload("mkl::_mkl_linear")] if _ops.has_mkl() else []),
        *([_ops.transposed_convolution()] if _ops.transposed_convolution() else []),
        *POST_OPS,
    }
)
#: What ``write_in_place`` puts in: the result is memory of the region's own, which nothing else
#: reads any more.
OVERWRITTEN = frozenset(
    {
        torch.Tensor.add_,
        torch.Tensor.sub_,
        torch.ops.mkldnn._convolution_pointwise_.binary,
        *IN_PLACE,
    }
)


def compute_once(graph: GraphModule) -> None:
    """Compute equal values once (each layer of a transformer makes its own attention mask)."""
    known: dict[Any, Node] = {}
    for node in list(graph.graph.nodes):
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        if node.is_impure() or torch.Tag.nondeterministic_seeded in target.tags:
            continue
        key = (target, _frozen(node.args), _frozen(node.kwargs))
        first = known.setdefault(key, node)
        # What the caller gets stays a value of its own.
        if first is not node and not (_is_returned(node, node) or _is_returned(first, first)):
            node.replace_all_uses_with(first)
            graph.graph.erase_node(node)


def _frozen(value: Any) -> Any:
    """Arguments as something to look up; numbers of other types are other arguments."""
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in sorted(value.items()))
    return value if isinstance(value, Node) else (type(value).__name__, repr(value))


def drop_copies(graph: GraphModule) -> None:
    """Use a value itself instead of its copy (dropout leaves those) where nobody can tell.

    The graph writes to none of its values, so a copy matters only to the caller: an input must
    not be handed out in its place, nor one piece of memory twice.
    """
    for node in list(graph.graph.nodes):
        if is_plain_clone(node) and _is_own(node.args[0]):
            source = node.args[0]
            if not _is_returned(source, besides=node):
                node.replace_all_uses_with(source)
                graph.graph.erase_node(node)


def join_views(graph: GraphModule) -> None:
    """Read a contiguous value through one view instead of several, or directly."""
    for node in list(graph.graph.nodes):
        if not calls(node, aten.view.default) or not calls(node.args[0], aten.view.default):
            continue
        source = node.args[0].args[0]
        if not is_contiguous(tensor(source)):
            continue
        if same_sizes(tensor(source).shape, tensor(node).shape) and not _is_returned(node, node):
            node.replace_all_uses_with(source)
        else:
            node.args = (source, node.args[1])
    graph.graph.eliminate_dead_code()


def _is_own(node: Node) -> bool:
    """Whether a value is memory that its op allocated."""
    if calls(node, operator.getitem):
        node = node.args[0]
    return isinstance(node.target, torch._ops.OpOverload) and not is_view(node.target)


def _is_returned(node: Node, besides: Node) -> bool:
    """Whether the caller gets a value or a view of it, ``besides`` aside."""
    return any(
        user.op == "output" or (is_view(user.target) and _is_returned(user, besides))
        for user in node.users
        if user is not besides
    )


def write_in_place(graph: GraphModule) -> None:
    """Let post-operations and additions overwrite an operand that is used for the last time."""
    order = {node: position for position, node in enumerate(graph.graph.nodes)}
    for node in graph.graph.nodes:
        if calls(node, CONVOLUTION_ADD) and node.args[8] == "add":
            _add_into_residual(node, order)
        elif calls(node, aten.add.Tensor, aten.sub.Tensor):
            _add_in_place(node, order)
        elif node.op == "call_function" and (post := post_op(node)) is not None:
            if _is_last_use(node.args[0], node, order):
                node.target = post.in_place
                node.args = (node.args[0], *post.args)
                node.kwargs = post.kwargs


def _add_in_place(node: Node, order: dict[Node, int]) -> None:
    left, right = node.args[:2]
    if argument(node, 2, "alpha", 1) != 1 or left is right:
        return
    if tensor(left) is None or tensor(right) is None:
        return
    subtracts = calls(node, aten.sub.Tensor)
    for mine, other in ((left, right),) if subtracts else ((left, right), (right, left)):
        if _is_last_use(mine, node, order) and tensor(other).dtype == tensor(node).dtype:
            node.target = torch.Tensor.sub_ if subtracts else torch.Tensor.add_
            node.args = (mine, other)
            return


def _add_into_residual(node: Node, order: dict[Node, int]) -> None:
    """Let a convolution add its result to the residual's memory."""
    x, other = node.args[:2]
    if x is other or not is_channels_last(tensor(other)):
        return
    if _is_last_use(other, node, order) and not _reaches(other, x):
        node.target = torch.ops.mkldnn._convolution_pointwise_.binary
        node.args = (other, x, *node.args[2:])


def _is_last_use(source: Any, node: Node, order: dict[Node, int]) -> bool:
    """Whether ``source`` is memory of the region's own that nothing reads after ``node``.

    Looks through views that nothing else uses; the result must fit into the memory as it lies.
    """
    found, result = tensor(source), tensor(node)
    if found is None or found.dtype != result.dtype or not same_sizes(found.shape, result.shape):
        return False
    if not found.is_floating_point():
        return False
    dense = is_contiguous(found) or is_channels_last(found)
    if not dense or not has_strides_of(found, result):
        return False
    while calls(source, *VIEWS):
        if len(source.users) != 1:
            return False
        node, source = source, source.args[0]
    if not (calls(source, *FRESH) or source.target in OVERWRITTEN):
        return False
    return all(
        user is node or (order[user] < order[node] and not is_view(user.target))
        for user in source.users
    )


def _reaches(source: Node, x: Node) -> bool:
    """Whether ``x`` is a view of ``source``."""
    while x.op == "call_function" and is_view(x.target) and x.all_input_nodes:
        x = x.all_input_nodes[0]
        if x is source:
            return True
    return False
