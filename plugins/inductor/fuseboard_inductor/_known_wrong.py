"""Ops that Inductor is known to get wrong. Each rule names the report and can go with the fix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten

_SCATTERS = {
    "index_add",
    "index_copy",
    "index_fill",
    "index_put",
    "_unsafe_index_put",
    "masked_scatter",
    "scatter",
    "scatter_add",
    "scatter_reduce",
}

_EXTREMES = {"amax", "amin", "aminmax", "argmax", "argmin", "max", "min"}


def why_not(node: Node) -> str | None:
    """The reason to decline a node, or None."""
    name = getattr(node.target, "_opname", "")
    for concerns, problem, reason in _RULES:
        if concerns(name) and problem(node):
            return reason
    return None


def _writes_to_expanded(node: Node) -> bool:
    """The tensor that is written into has one element in several places."""
    return _is_expanded(node.args[0])


def _is_expanded(value: Any) -> bool:
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(tensor, torch.Tensor) and any(
        isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size == 1)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _rounds_up(node: Node) -> bool:
    """``ceil_mode`` of an average pooling's backward."""
    arguments = _by_name(node)
    return bool(arguments.get("ceil_mode"))


def _reads_bytes(node: Node) -> bool:
    """One tensor of 8-bit integers, on the CPU."""
    values = [one.meta.get("val") for one in node.all_input_nodes]
    return len(values) == 1 and any(
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.dtype in (torch.int8, torch.uint8)
        for value in values
    )


def _by_name(node: Node) -> dict[str, Any]:
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given: dict[str, Any] = {
        argument.name: value for argument, value in zip(schema, node.args, strict=False)
    }
    return {**given, **node.kwargs}


_RULES: Sequence[tuple[Callable[[str], bool], Callable[[Node], bool], str]] = (
    (
        _SCATTERS.__contains__,
        _writes_to_expanded,
        "indexed write to an expanded tensor gives wrong values (pytorch#183986)",
    ),
    (
        lambda name: name in {"avg_pool2d_backward", "avg_pool3d_backward"},
        _rounds_up,
        "gradient of average pooling with ceil_mode is wrong (pytorch#198119)",
    ),
    (
        _EXTREMES.__contains__,
        _reads_bytes,
        "the extreme of 16 or more 8-bit integers may come out as 0 (pytorch#191499)",
    ),
)
