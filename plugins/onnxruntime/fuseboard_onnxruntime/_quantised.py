"""Products of quantised numbers as ONNX Runtime's products of integers.

ONNX Runtime itself makes one kernel of dequantise, product and quantise only where the bias is made
of integers, too, which rounds it to another number than eager's. As a product of integers, whose
scale and bias come after it in float32, a linear layer is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fuseboard_onnxruntime._torch_internals import quantised_ops

aten: Any = torch.ops.aten

#: Products of 255 * 128 that a sum in 32 bits holds.
MOST_PRODUCTS = 2**31 // (255 * 128)


@torch.library.custom_op("fuseboard_onnxruntime::integer_product", mutates_args=())
def integer_product(
    x: torch.Tensor,
    scale: float,
    zero_point: int,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor,
) -> torch.Tensor:
    """Integers (M, K) times integers (N, K), as float32 (M, N).

    :param scales: one for each of N, as are the ``zero_points``.
    """
    left = (x.double() - zero_point) * scale
    right = (weight.double() - zero_points[:, None]) * scales[:, None]
    return (left @ right.t()).float()


integer_product.register_fake(
    lambda x, scale, zero_point, weight, scales, zero_points: x.new_empty(
        (x.shape[0], weight.shape[0]), dtype=torch.float32
    )
)


def ops() -> tuple[Any, ...]:
    """Quantise and dequantise per tensor, dequantise per channel; nothing where torch has none."""
    found = quantised_ops()
    if found is None:
        return ()
    packets = (found.quantize_per_tensor, found.dequantize_per_tensor, found.dequantize_per_channel)
    return tuple(packet.default for packet in packets)


def integer_products(graph: GraphModule) -> tuple[str, ...]:
    """Write the products of dequantised numbers as products of integers.

    :returns: how many there are, a note for the report.
    """
    count = 0
    for node in list(graph.graph.nodes):
        if node.target in ops():
            node.kwargs = {}  # the dtype of the result, float32 in either case
        if node.target in (aten.mm.default, aten.addmm.default) and _is_quantised(node):
            _rewrite(graph.graph, node)
            count += 1
    graph.graph.eliminate_dead_code()
    return (f"products of integers ×{count}",) if count else ()


def _is_quantised(node: Node) -> bool:
    ops = quantised_ops()
    if ops is None or {"alpha", "beta"} & node.kwargs.keys() or len(node.args) > 3:
        return False
    x, columns = _source(node.args[-2]), node.args[-1]
    if x is None or x.target is not ops.dequantize_per_tensor.default or not _is_transpose(columns):
        return False
    weight: Any = columns.args[0]  # type: ignore[union-attr]
    if weight.op != "call_function" or weight.target is not ops.dequantize_per_channel.default:
        return False
    held, axis = weight.args[0].meta["val"], weight.args[3]
    given = isinstance(weight.args[2], Node)
    return given and axis in (0, -2) and held.dim() == 2 and held.shape[1] <= MOST_PRODUCTS


def _is_transpose(node: Any) -> bool:
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    if node.target is aten.permute.default:
        return list(node.args[1]) in ([1, 0], [-1, 0], [-1, -2])  # type: ignore[arg-type]
    return node.target is aten.t.default


def _source(node: Any) -> Node | None:
    """What made floats of integers, where nothing but views lies between."""
    while isinstance(node, Node) and node.target is aten.view.default:
        node = node.args[0]
    made = isinstance(node, Node) and node.op == "call_function"
    return node if made else None


def _rewrite(graph: Graph, node: Node) -> None:
    x, columns = node.args[-2:]
    weight: Any = columns.args[0]  # type: ignore[union-attr]
    source: Any = _source(x)
    val = node.meta["val"]
    with graph.inserting_before(node):
        integers = source.args[0]
        if x is not source:
            integers = graph.call_function(aten.view.default, (integers, list(x.meta["val"].shape)))  # type: ignore[union-attr]
            integers.meta["val"] = source.args[0].meta["val"].new_empty(x.meta["val"].shape)  # type: ignore[union-attr]
        args = (integers, *source.args[1:3], *weight.args[:3])
        product = torch.ops.fuseboard_onnxruntime.integer_product.default
        new = graph.call_function(product, args)
        new.meta["val"] = val
        if len(node.args) == 3:
            new = graph.call_function(aten.add.Tensor, (new, node.args[0]))
            new.meta["val"] = val
    node.replace_all_uses_with(new)
    graph.erase_node(node)
