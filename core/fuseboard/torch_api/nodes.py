"""What nodes of graphs call, and the graphs that a graph holds."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node


def target_name(node: Node) -> str:
    """What a node calls, as people write it: ``aten.addmm.default``, ``operator.getitem``."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}.{target._overloadname}"
    module = (getattr(target, "__module__", "") or "").removeprefix("_")
    name = getattr(target, "__name__", None) or str(target)
    return f"{module}.{name}" if module else name


def graphs_in(graph: torch.nn.Module) -> list[GraphModule]:
    """A graph and all graphs in it, such as the branches of a ``cond``."""
    return [one for one in graph.modules() if isinstance(one, GraphModule)]
