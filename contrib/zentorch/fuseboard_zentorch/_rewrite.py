"""ATen's products and attention as calls of zentorch's operators.

A weight is packed by a call in the graph. It depends on the weight alone, so the board hoists it:
it runs once for each set of weights and again when one of them changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fuseboard
from fuseboard_zentorch import _engine
from fuseboard_zentorch._match import (
    ATTENTION,
    BINARY,
    LINEAR,
    TRANSPOSES,
    VIEWS,
    Linear,
    aten,
    is_native,
    linear_at,
    weights,
)
from fuseboard_zentorch._options import Options
from fuseboard_zentorch._values import is_contiguous, tensor


def rewrites(
    graph: GraphModule, static: Collection[int], options: Options
) -> list[fuseboard.Fusion]:
    """One for each product and attention that is ZenDNN's; no node is in two of them.

    :param static: positions of the inputs that are parameters or buffers.
    """
    weight_nodes = weights(graph, static)
    taken: set[Node] = set()
    found = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or is_native(node, weight_nodes, options) is not None:
            continue
        if node.target in LINEAR and node.args[-2] in weight_nodes:
            continue  # constant as a whole: hoisted as it is
        if node.target is aten.bmm.default:
            found.append(_fusion("bmm", [node], partial(_retarget, node, "bmm")))
        elif node.target is ATTENTION:
            found.append(_fusion("attention", [node], partial(_retarget, node, "sdpa")))
        else:
            layer = linear_at(node, taken)
            found.append(_fusion(layer.name, layer.nodes, partial(_replace, layer)))
            taken.update(layer.nodes)
        taken.add(node)
    return found


def _fusion(name: str, nodes: Sequence[Node], apply: Callable[[], None]) -> fuseboard.Fusion:
    return fuseboard.Fusion(name, tuple(node.name for node in nodes), apply)


def _retarget(node: Node, name: str) -> None:
    """Another operator with the same arguments and results."""
    node.target = _engine.operator(name)


def _replace(layer: Linear) -> None:
    """One call for a layer, where its last node was."""
    last = layer.nodes[-1]
    graph, product = last.graph, tensor(layer.product)
    assert product is not None
    with graph.inserting_before(last):
        packed = _packed(layer.product.args[-1])  # type: ignore[arg-type]
        options: dict[str, Any] = {"is_weight_prepacked": True}
        activation = "none" if layer.silu is None else "silu"
        if layer.binary is None:
            target = _engine.operator("linear_unary")
            args: tuple[Any, ...] = (layer.x, packed, layer.bias)
            options["post_op"] = activation
        else:
            target = _engine.operator("linear_unary_binary")
            args = (layer.x, packed, layer.other, layer.bias)
            options |= {"post_op_1": activation, "post_op_2": BINARY[layer.binary.target]}
        call = graph.call_function(target, args, options)
    call.meta = dict(last.meta)
    last.replace_all_uses_with(call)
    operands = layer.product.args[-2:]
    for node in reversed(layer.nodes):
        graph.erase_node(node)
    for operand in operands:
        _erase_view(operand)


def _erase_view(node: Any) -> None:
    """A view that nothing reads any more, and what it was of if that is one."""
    if node.target in (*VIEWS, *TRANSPOSES) and not node.users:
        source = node.args[0]
        node.graph.erase_node(node)
        _erase_view(source)


def _packed(columns: Node) -> Node:
    """The weight that ``columns`` (K, N) is made of, packed. Called where nodes are put in."""
    weight = _rows(columns)
    value = tensor(weight)
    assert value is not None
    if not is_contiguous(value) or 1 in value.shape:  # packing looks at the strides of ones, too
        weight = _call(
            weight,
            aten.clone.default,
            value.contiguous(),
            memory_format=torch.contiguous_format,
        )
        value = value.contiguous()
    # What it answers has the weight's shape and a layout of ZenDNN's own.
    return _call(weight, _engine.operator("weight_prepack_for_linear"), value.contiguous())


def _rows(columns: Node) -> Node:
    """The weight as (N, K)."""
    if columns.target in TRANSPOSES:
        source, own = tensor(columns.args[0]), tensor(columns)
        assert source is not None
        assert own is not None
        if source.shape == own.shape[::-1] and source.stride() == own.stride()[::-1]:
            return columns.args[0]  # type: ignore[return-value]
    value = tensor(columns)
    assert value is not None
    return _call(columns, aten.t.default, value.t())


def _call(source: Node, target: Any, value: torch.Tensor, **options: Any) -> Node:
    node = source.graph.call_function(target, (source,), options)
    node.meta = {"val": value}
    return node
