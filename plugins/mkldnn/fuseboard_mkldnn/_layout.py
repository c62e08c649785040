"""Channels-last between convolutions, eager's strides everywhere else.

Each rewritten convolution is followed by a conversion to the strides that eager has. The
conversions are then moved down past ops that run in either layout, and vanish where the next
user is another convolution.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map

from fuseboard_mkldnn import _int8_kernels as kernels
from fuseboard_mkldnn import _ops
from fuseboard_mkldnn._exact import CONVOLUTION, CONVOLUTION_ADD
from fuseboard_mkldnn._graph import (
    Editor,
    aten,
    calls,
    channels_last,
    has_strides_of,
    is_channels_last,
    same_sizes,
    tensor,
)
from fuseboard_mkldnn._quantised_ops import dequantises, quantises

#: Ops of one result that compute the same in any layout and keep that of their input.
KEEP = frozenset(
    {
        aten.abs.default,
        aten.clamp.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.elu.default,
        aten.gelu.default,
        aten.hardsigmoid.default,
        aten.hardswish.default,
        aten.hardtanh.default,
        aten.leaky_relu.default,
        aten.neg.default,
        aten.relu.default,
        aten.sigmoid.default,
        aten.silu.default,
        aten.tanh.default,
        aten._adaptive_avg_pool2d.default,
        aten.avg_pool2d.default,
    }
)
#: The same for two operands.
KEEP_BOTH = frozenset({aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor})
POOLS = frozenset({aten.max_pool2d_with_indices.default})
#: Ops whose result has no layout to speak of.
REDUCE = frozenset({aten.mean.dim})

ANY_LAYOUT = KEEP | KEEP_BOTH | POOLS | {aten.cat.default, operator.getitem}
BATCH_NORM = aten._native_batch_norm_legit_no_training.default


def linked(convolutions: set[Node]) -> set[Node]:
    """The convolutions that feed another one, or are fed, through ops that run in any layout."""
    found: set[Node] = set()
    for start in convolutions:
        seen, pending = {start}, [start]
        while pending:
            for user in pending.pop().users:
                if user in convolutions:
                    found |= {start, user}
                elif user not in seen and (user.target in ANY_LAYOUT or calls(user, BATCH_NORM)):
                    seen.add(user)
                    pending.append(user)
    return found


def to_strides_of(edit: Editor, result: Node, wanted: torch.Tensor) -> Node:
    """``result``, which lies channels-last, converted to contiguous if ``wanted`` is."""
    if has_strides_of(tensor(result), wanted):
        return result
    memory_format = {"memory_format": torch.contiguous_format}
    return edit.call(aten.clone.default, (result,), wanted, memory_format)


def sink_conversions(graph: GraphModule) -> None:
    """Move conversions down to where they are needed, and drop the others."""
    twins: dict[Node, Node] = {}
    for node in list(graph.graph.nodes):
        if _is_conversion(node):
            twins[node] = node.args[0]
        elif calls(node, kernels.convolution):
            given = [twins.get(arg, arg) if isinstance(arg, Node) else arg for arg in node.args]
            node.args = tuple(given)
        elif calls(node, CONVOLUTION, CONVOLUTION_ADD, _ops.transposed_convolution()):
            count = 2 if calls(node, CONVOLUTION_ADD) else 1
            given = [twins.get(arg, arg) for arg in node.args[:count]]
            node.args = (*given, *node.args[count:])
        elif node.op == "call_function" and (twin := _twin(node, twins)) is not None:
            if isinstance(twin.meta["val"], torch.Tensor) and has_strides_of(
                tensor(twin), tensor(node)
            ):
                node.replace_all_uses_with(twin)
            else:
                twins[node] = twin
                _convert_after(node, twin, twins)
    graph.graph.eliminate_dead_code()


def _is_conversion(node: Node) -> bool:
    if not calls(node, aten.clone.default):
        return False
    source = tensor(node.args[0])
    wanted = node.kwargs.get("memory_format") is torch.contiguous_format
    return wanted and source is not None and is_channels_last(source)


def _convert_after(node: Node, twin: Node, twins: dict[Node, Node]) -> None:
    """Give the users of ``node`` a conversion of its twin; tuples are converted item by item."""
    if not isinstance(twin.meta["val"], torch.Tensor):
        return
    edit = Editor(node.next)
    converted = to_strides_of(edit, twin, tensor(node))
    node.replace_all_uses_with(converted)
    twins[converted] = twin


def _twin(node: Node, twins: dict[Node, Node]) -> Node | None:
    """``node`` on channels-last inputs, or None where it can't or needn't be."""
    inputs = node.all_input_nodes
    if not any(one in twins for one in inputs):
        return None
    if node.target in KEEP | POOLS or dequantises(node) or quantises(node):
        able = node.args[0] in twins and len(inputs) == 1 and not _names_layout(node)
    elif node.target in KEEP_BOTH:
        able = _all_alike(inputs, twins)
    elif calls(node, aten.cat.default):
        able = all(one in twins for one in inputs)
    elif node.target is operator.getitem:
        able = True
    else:
        able = node.target in REDUCE
    if not able:
        return None
    args, kwargs = tree_map(
        lambda one: twins.get(one, one) if isinstance(one, Node) else one,
        (node.args, node.kwargs),
    )
    return Editor(node).call(node.target, args, _lay_out(node.meta["val"], node), kwargs)


def _names_layout(node: Node) -> bool:
    return node.kwargs.get("memory_format") not in (None, torch.preserve_format)


def _all_alike(inputs: list[Node], twins: dict[Node, Node]) -> bool:
    """Whether operands are channels-last or so small that they don't decide the layout."""
    shape = next(tensor(one) for one in inputs if one in twins).shape
    for one in inputs:
        found = tensor(one)
        if found is None:
            return False  # a symbolic number
        if one in twins:
            if not same_sizes(found.shape, shape):
                return False
        elif found.dim() != 0 and not is_channels_last(found):
            return False
    return True


def _lay_out(found: Any, node: Node) -> Any:
    """The fake value of a twin."""
    if isinstance(found, list | tuple):
        return type(found)(_lay_out(one, node) for one in found)
    if node.target in REDUCE or not isinstance(found, torch.Tensor) or found.dim() not in (4, 5):
        return found
    return channels_last(found)
