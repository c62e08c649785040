"""Which nodes this backend takes: what oneDNN runs, and what lies between."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fuseboard
from fuseboard_mkldnn import _ops
from fuseboard_mkldnn._conv import is_convolution, is_folded_norm
from fuseboard_mkldnn._graph import aten, calls, is_view
from fuseboard_mkldnn._layer_norm import layer_norms
from fuseboard_mkldnn._linear import is_linear
from fuseboard_mkldnn._lstm import is_lstm
from fuseboard_mkldnn._pointwise import post_op
from fuseboard_mkldnn._quantised import floats_of, is_quantised_product, weight_of
from fuseboard_mkldnn._quantised_ops import rounds_or_widens
from fuseboard_mkldnn._transposed import is_transposed
from fuseboard_mkldnn._weight_only import find_weight_only

#: ATen's own CPU kernels for these are as good as what a compiler would make of their parts.
GOOD_KERNELS = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.embedding.default,
        aten.max_pool2d_with_indices.default,
        aten.native_layer_norm.default,
        aten._weight_int8pack_mm.default,
        aten._weight_int4pack_mm_for_cpu.default,
    }
)


def claim(graph: GraphModule, kind: str) -> list[fuseboard.Claim | fuseboard.Decline]:
    """One claim of all that can run here, provided that there is something for oneDNN in it."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    if kind != "inference":
        return [_decline(node, "mkldnn takes inference graphs only") for node in nodes]
    if reason := _ops.why_switched_off():
        return [_decline(node, reason) for node in nodes]
    weights = _from_placeholders(graph)
    main = {node for node in nodes if _is_main(node, weights)}
    weight_only = find_weight_only(graph)
    main.update(one.product for one in weight_only)
    if not main:
        return [_decline(node, "nothing here for oneDNN") for node in nodes]
    native = main | _around(main) | {node for node in nodes if node.target in GOOD_KERNELS}
    if any(map(is_quantised_product, main)):
        native.update(filter(rounds_or_widens, nodes))
    native.update(node for found in layer_norms(graph) for node in found.nodes)
    for one in weight_only:
        native.update(one.nodes, one.weight.nodes)
    return fuseboard.claim_nodes(graph, why_not, native=native.__contains__)


def why_not(node: Node) -> str | None:
    """The reason to decline a node, or None: most ops are carried along and run as in eager."""
    target: Any = node.target
    for used in (node, *node.all_input_nodes):
        found = used.meta.get("val")
        for one in found if isinstance(found, list | tuple) else (found,):
            if isinstance(one, torch.Tensor) and one.device.type != "cpu":
                return f"on device {one.device.type}; oneDNN runs on the CPU"
            if isinstance(one, torch.Tensor | torch.SymInt) and _ops.has_unbacked_symbols(one):
                return "its size is known only from data"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher-order op {target.name()}"
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in _NAMESPACES:
            return f"{target.name()} isn't an ATen op"
        if target._schema.is_mutable:
            return f"{target.name()} writes to its inputs"
        return None
    if target is operator.getitem or getattr(target, "__module__", "") in _SCALAR_MODULES:
        return None
    return f"{target!r} isn't an op"


_SCALAR_MODULES = ("_operator", "math", "torch")
#: Torch's ops and the board's own, which have kernels for the CPU.
_NAMESPACES = ("aten", "prims", "prim", "mkldnn", "quantized_decomposed", "fuseboard")


def _decline(node: Node, reason: str) -> fuseboard.Decline:
    return fuseboard.Decline(node=node.name, reason=reason)


def _from_placeholders(graph: GraphModule) -> set[Node]:
    """Graph inputs, views of them and casts: what may turn out to be a weight."""
    found: set[Node] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            found.add(node)
        elif node.op == "call_function" and node.all_input_nodes:
            moves = is_view(node.target) or calls(node, aten._to_copy.default)
            if moves and found.issuperset(node.all_input_nodes):
                found.add(node)
    return found


def _is_main(node: Node, weights: set[Node]) -> bool:
    """Whether oneDNN may run a node better than eager does."""
    if is_quantised_product(node):
        return floats_of(weight_of(node)) in weights
    if is_convolution(node) or is_transposed(node):
        return node.args[1] in weights
    if is_lstm(node):
        return weights.issuperset(node.args[1:3])
    return is_linear(node) and node.args[-1] in weights


def _around(main: set[Node]) -> set[Node]:
    """What is fused to the main nodes, or vanishes: norms, post-operations, views, residuals."""
    found: set[Node] = set()
    pending = list(main)
    while pending:
        for user in pending.pop().users:
            if user in found or user.op != "call_function":
                continue
            if (
                post_op(user) is not None
                or is_folded_norm(user)
                or calls(user, aten.add.Tensor, aten.clone.default)
                or is_view(user.target)
            ):
                found.add(user)
                if user.target is operator.getitem or not calls(user, aten.add.Tensor):
                    pending.append(user)
    return found
