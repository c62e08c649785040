"""Which nodes this backend takes, and which of these it runs better than eager."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

import fuseboard
from fuseboard_onnxruntime import _quantised
from fuseboard_onnxruntime._forms import why_not_claimed
from fuseboard_onnxruntime._simplify import composites

aten: Any = torch.ops.aten

#: ONNX Runtime has a kernel for each of these that is as good as eager's or better.
_NATIVE = frozenset(
    {
        aten.addmm.default,
        aten.mm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        *fuseboard.OWN_OPS,
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten._native_batch_norm_legit_no_training.default,
        aten._softmax.default,
        aten.gelu.default,
        aten.embedding.default,
        aten.max_pool2d_with_indices.default,
        aten.avg_pool2d.default,
        aten._adaptive_avg_pool2d.default,
    }
)
#: What it fuses to them: activations, biases, residuals.
_FUSED = frozenset(
    {
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.relu.default,
        aten.hardtanh.default,
        aten.sigmoid.default,
        aten.silu.default,
        aten.tanh.default,
    }
)


def claim(graph: GraphModule, kind: str) -> list[fuseboard.Claim | fuseboard.Decline]:
    """All that is in the op table. Pointwise work isn't native unless a kernel takes it in.

    :param kind: the graph's; some ops are exact enough for inference only.

    ONNX Runtime calls a kernel for each pointwise op, so a chain of them is no better than
    eager's, and several times slower than what a compiler makes of it.
    """
    native = {node for node in graph.graph.nodes if node.target in _NATIVE}
    kernels = [frozenset(found.nodes) for found in composites(graph)]
    native.update(*kernels)
    for node in list(native):
        native.update(_around(node))
    # What a kernel computes well although its parts by themselves are declined, such as a long sum.
    why_not = why_not_claimed if kind == "inference" else _why_not_in_training
    wholes = [nodes for nodes in kernels if any(map(why_not, nodes))]
    names = [frozenset(node.name for node in nodes) for nodes in wholes]
    within = frozenset().union(*names)
    others = fuseboard.claim_nodes(graph, why_not, native=native.__contains__)
    return [
        *(fuseboard.Claim(nodes=whole, native=whole, together=True) for whole in names),
        *(a for a in others if isinstance(a, fuseboard.Claim) or a.node not in within),
    ]


def _why_not_in_training(node: Node) -> str | None:
    """The reason to decline a node of a graph whose values gradients are computed from.

    MLAS's tanh is off by up to 4.3 units in the last place, eager's by 0.5. The gradient 1 - y * y
    makes 5e-7 of that near 1, where eager's is off by 9e-8, and what is behind it magnifies it.
    """
    by_tanh = aten.gelu_backward.default
    if node.target is aten.tanh.default or (
        node.target is by_tanh and node.kwargs.get("approximate") == "tanh"
    ):
        return "ONNX Runtime's tanh isn't exact enough for gradients, which magnify its error"
    return why_not_claimed(node)


def _around(node: Node) -> set[Node]:
    """Views of a node's result, items of it, and the op that is fused to it."""
    found: set[Node] = set()
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user in found or user.op != "call_function":
            continue
        if _is_view(user.target):
            found.add(user)
            pending.extend(user.users)
        elif user.target in _FUSED or user.target in _quantised.ops():
            found.add(user)
    return found


def _is_view(target: Any) -> bool:
    return bool(getattr(target, "is_view", False)) or getattr(target, "__name__", "") == "getitem"
