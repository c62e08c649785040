"""Which nodes this backend takes: ZenDNN's own, and what lies between, which runs as in eager."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fuseboard
from fuseboard_zentorch import _engine
from fuseboard_zentorch._match import ATTENTION, LINEAR, aten, is_native, linear_at, weights
from fuseboard_zentorch._options import Options

_PRODUCTS = (*LINEAR, aten.bmm.default, ATTENTION)


def claim(graph: GraphModule, options: Options) -> list[fuseboard.Claim | fuseboard.Decline]:
    """One claim, provided that there is something for ZenDNN in the graph."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    if problem := _engine.problem():
        return [fuseboard.Decline(node.name, problem) for node in nodes]
    weight_nodes = weights(graph)
    reasons = {node: is_native(node, weight_nodes, options) for node in nodes}
    own = {node for node, reason in reasons.items() if reason is None}
    if not own:
        nothing = "there is no product for ZenDNN in this graph"
        return [
            fuseboard.Decline(n.name, (reasons[n] or nothing) if n.target in _PRODUCTS else nothing)
            for n in nodes
        ]
    for node in list(own):
        if node.target in LINEAR:
            own.update(linear_at(node, own).nodes)
    return fuseboard.claim_nodes(graph, _why_not, native=own.__contains__)


def _why_not(node: Node) -> str | None:
    """Why a node can't even be carried along."""
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher-order op {target.name()}"
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in ("aten", "prims", "prim"):
            return f"{target.name()} isn't an ATen op"
        if target._schema.is_mutable:
            return f"{target.name()} writes to its inputs"
        return None
    if target is operator.getitem or getattr(target, "__module__", "") in _SCALAR_MODULES:
        return None
    return f"{target!r} isn't an op"


#: Where functions on symbolic sizes come from.
_SCALAR_MODULES = ("_operator", "math", "torch")
