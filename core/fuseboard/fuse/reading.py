"""Reading nodes of Dynamo's graphs, where an op is a function or a method of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node


@dataclass(frozen=True)
class Operand:
    """A node read with its dimensions in another order: None means as they are."""

    node: Node
    order: tuple[int, ...] | None = None


def calls(node: Any, targets: set[Any]) -> bool:
    """Whether a node calls one of some functions, or of some methods, which are named."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return False
    return isinstance(node.target, str) == (node.op == "call_method") and node.target in targets


def argument(node: Node, place: int, name: str) -> Any:
    """None where it isn't passed."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def value_of(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node; None where it has another value, or isn't one."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def dtype_of(node: Any) -> torch.dtype | None:
    value = value_of(node)
    return None if value is None else value.dtype
