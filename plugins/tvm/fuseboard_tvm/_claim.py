"""Which nodes this backend runs, and why not the others."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fuseboard
from fuseboard_tvm import _decompose
from fuseboard_tvm.ops import OPS
from fuseboard_tvm.ops.registry import DTYPES


def claim(graph: GraphModule) -> list[fuseboard.Claim | fuseboard.Decline]:
    """All that the op layer has; native is what TVM's own code computes."""

    def is_native(node: Node) -> bool:
        op = OPS.get(node.target)
        return op is None or op.native

    return fuseboard.claim_nodes(graph, why_not, native=is_native)


def why_not(node: Node) -> str | None:
    """The reason to decline a node, or None."""
    if node.target is operator.getitem:
        source = node.args[0]
        if not isinstance(source, Node) or source.op != "call_function":
            return "its source isn't an op"
        return why_not(source) or why_not_tensor(node.meta["val"])
    target: Any = node.target
    op = OPS.get(target)
    if op is None and target not in _decompose.table():
        return f"{target} isn't in the op layer"
    if target._schema.is_mutable:
        return f"{target} writes to its inputs"
    for value in _tensors(node):
        reason = why_not_tensor(value)
        if reason is not None:
            return reason
    if any(isinstance(one, torch.SymInt | torch.SymFloat) for one in _numbers(node)):
        return "its arguments are known only in a call"
    return op.why_not(node) if op is not None else None


def _tensors(node: Node) -> list[torch.Tensor]:
    """Operands and results; of several results those that are read."""
    found = [used.meta.get("val") for used in node.all_input_nodes]
    own = node.meta.get("val")
    if isinstance(own, list | tuple):
        found += [own[user.args[1]] for user in node.users if user.target is operator.getitem]  # type: ignore[index]
    else:
        found.append(own)
    return [one for one in found if isinstance(one, torch.Tensor)]


def _numbers(node: Node) -> list[Any]:
    return [used.meta.get("val") for used in node.all_input_nodes]


def why_not_tensor(value: torch.Tensor) -> str | None:
    """What speaks against a tensor."""
    if value.device.type != "cpu":
        return f"device {value.device.type}; this backend runs on cpu"
    if value.layout != torch.strided:
        return f"layout {value.layout} isn't supported"
    if value.dtype not in DTYPES:
        allowed = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
        return f"dtype {value.dtype} isn't supported ({allowed})"
    if any(not isinstance(size, int) for size in value.shape):
        return "symbolic sizes aren't supported"
    if math.prod(value.shape) == 0:
        return "a tensor without elements"
    if len(value.shape) and math.prod(value.shape) >= 2**40:
        return "a tensor of 2**40 elements or more"
    return None
