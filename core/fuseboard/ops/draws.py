"""Which ops draw random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

#: Arguments that switch an op's randomness off, and the value that does.
_SWITCHES = {"dropout_p": 0, "p": 0, "dropout": 0, "train": False, "training": False}


def draws(node: Node) -> bool:
    """Whether a node draws random numbers with the arguments that it has."""
    return call_draws(node.target, node.args, node.kwargs)


def call_draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = target._schema.arguments
    values = {argument.name: argument.default_value for argument in arguments}
    values.update(zip(values, args, strict=False))
    values.update(kwargs)
    return not any(values.get(name) == off for name, off in _SWITCHES.items() if name in values)


def may_draw(node: Node) -> bool:
    """Whether a node draws random numbers, itself or in a graph that it calls."""
    return draws(node) or isinstance(node.target, torch._ops.HigherOrderOperator)


def hides_draws(node: Node, owner: torch.nn.Module) -> bool:
    """Whether a higher-order op's own graphs draw random numbers."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    for used in node.all_input_nodes:
        inner = getattr(owner, str(used.target), None) if used.op == "get_attr" else None
        if isinstance(inner, GraphModule) and any(
            draws(n) or hides_draws(n, inner) for n in inner.graph.nodes
        ):
            return True
    return False
