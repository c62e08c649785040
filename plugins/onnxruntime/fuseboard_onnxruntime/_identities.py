"""Ops that change no element: models are written without them.

What lies otherwise in memory is the same to ONNX, which knows values and no strides. Torch's ONNX
library gives some of these ops back as the value that went in, and an output of a model that is
one of its inputs is memory that nobody writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from fuseboard_onnxruntime._torch_internals import known_equal

aten: Any = torch.ops.aten
prims: Any = torch.ops.prims


def drop_identities(graph: Graph) -> None:
    """Replace each of these ops by what went into it.

    :param graph: with fake values; the strides of values that are read may be others afterwards.
    """
    for node in list(graph.nodes):
        source = _source(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _source(node: Node) -> Node | None:
    """The value that a node gives back as it is; None where it may change something."""
    condition = _CONDITIONS.get(node.target) if node.op == "call_function" else None
    source = node.args[0] if condition is not None else None
    if isinstance(source, list | tuple):  # tensors that are joined
        source = source[0] if len(source) == 1 else None
    if condition is None or not isinstance(source, Node):
        return None
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    if before.dtype != after.dtype or before.dim() != after.dim():
        return None
    if not all(map(known_equal, before.shape, after.shape)):
        return None
    return source if condition(node, before, after) else None


def _always(node: Node, before: torch.Tensor, after: torch.Tensor) -> bool:
    """Elements stay in their order, so of an equal shape they are where they were."""
    return True


def _in_order(node: Node, before: torch.Tensor, after: torch.Tensor) -> bool:
    order = [int(dim) % before.dim() for dim in node.args[1]]  # type: ignore[union-attr, arg-type]
    return order == list(range(before.dim()))


def _with_itself(node: Node, before: torch.Tensor, after: torch.Tensor) -> bool:
    first, second = (int(dim) for dim in node.args[1:3])  # type: ignore[arg-type]
    return not before.dim() or (first - second) % before.dim() == 0


def _no_matrix(node: Node, before: torch.Tensor, after: torch.Tensor) -> bool:
    return before.dim() < 2


def _by_nothing(node: Node, before: torch.Tensor, after: torch.Tensor) -> bool:
    """Padding by 1 and -1 keeps a size and moves the elements."""
    return all(isinstance(pad, int) and pad == 0 for pad in node.args[1])  # type: ignore[union-attr]


def _laid_out_alike(node: Node, before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.storage_offset() != after.storage_offset():
        return False
    return all(map(known_equal, before.stride(), after.stride()))


_CONDITIONS: dict[Any, Callable[[Node, torch.Tensor, torch.Tensor], bool]] = {
    **dict.fromkeys(
        (
            *(aten.alias.default, aten.detach.default),
            *(aten.clone.default, aten.lift_fresh_copy.default),
            *(aten.view.default, aten.reshape.default, aten._unsafe_view.default),
            *(aten.expand.default, aten.repeat.default, aten.cat.default),
            *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
            *(aten.slice.Tensor, aten._to_copy.default),
            *(prims.copy_strided.default, prims.squeeze.default),
        ),
        _always,
    ),
    aten.permute.default: _in_order,
    aten.transpose.int: _with_itself,
    aten.t.default: _no_matrix,
    aten.constant_pad_nd.default: _by_nothing,
    aten.as_strided.default: _laid_out_alike,
}
