"""What may not stand between the parts of a pattern in Dynamo's graph, where code has effects.

Ops that are written as one run where the last of them stood. So nothing in between may write to
what they read, or change the modes under which they run. What isn't known counts as either.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.fx import Node

#: ``operator``'s functions that write to their first operand.
_IN_PLACE = frozenset(
    {"iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow"}
    | {"irshift", "isub", "itruediv", "ixor", "setitem", "delitem"}
)
#: Of torch's functions those that change modes begin with one of these.
_MODES = ("_set_", "_enter_", "_exit_", "_grad_", "_jvp_", "_vmap_", "_saved_tensors_hooks_")


def interrupted(nodes: list[Node]) -> bool:
    """Whether something else stands between the first and the last of some nodes of one graph."""
    order = {node: place for place, node in enumerate(nodes[0].graph.nodes)}
    first, last = min(nodes, key=order.__getitem__), max(nodes, key=order.__getitem__)
    node = first
    while node is not last:
        node = node.next
        if node not in nodes and has_effects(node):
            return True
    return False


def has_effects(node: Node) -> bool:
    """Whether a node may write to a tensor, or change a mode."""
    if node.op == "call_method":
        name = str(node.target)
        return _ends_in_place(name) or name.strip("_") in _IN_PLACE
    if node.op != "call_function":
        return node.op == "call_module"
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, torch._ops.HigherOrderOperator | torch._ops.OpOverloadPacket):
        return True
    name = getattr(target, "__name__", "")
    if (getattr(target, "__module__", None) or "torch").startswith(("operator", "_operator")):
        return name in _IN_PLACE
    return _ends_in_place(name) or name.startswith(_MODES) or _is_in_place(node)


def opens_a_level(node: Node) -> bool:
    """Whether a node opens a level of ``torch.func`` or of forward-mode AD."""
    name = getattr(node.target, "__name__", "")
    return name.endswith("_increment_nesting") or name == "_enter_dual_level"


def _ends_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _is_in_place(node: Node) -> bool:
    """Whether a function was told to write to its input or to another tensor."""
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return True
    try:
        names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # of C++, which has no such parameter
        return False
    return "inplace" in names and any(
        name == "inplace" and bool(value) for name, value in zip(names, node.args, strict=False)
    )
