"""A rewritten region as flat code that calls the operators."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import GraphModule

import fuseboard

aten = torch.ops.aten

#: Activations that a product's kernel doesn't do, over its result instead of beside it: at these
#: sizes a new tensor costs more than the activation.
IN_PLACE: dict[Any, Any] = {
    aten.gelu.default: aten.gelu_.default,
    aten.hardsigmoid.default: aten.hardsigmoid_.default,
    aten.hardswish.default: aten.hardswish_.default,
    aten.relu.default: aten.relu_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.tanh.default: aten.tanh_.default,
}


def lower(region: fuseboard.Region) -> fuseboard.LoweredRegion:
    """The region's ops one by one, activations of products in place."""
    graph = region.graph
    write_in_place(graph)
    graph.recompile()
    return dataclasses.replace(fuseboard.lower_eagerly(region), notes=_notes(graph))


def write_in_place(graph: GraphModule) -> None:
    """Write an activation over a product that nothing else reads."""
    for node in graph.graph.nodes:
        product: Any = node.args[0] if node.target in IN_PLACE else None
        if _is_ours(product) and len(product.users) == 1:
            node.target = IN_PLACE[node.target]


def _is_ours(node: Any) -> bool:
    target = getattr(node, "target", None)
    return getattr(target, "namespace", "") == "zentorch"


def _notes(graph: GraphModule) -> tuple[str, ...]:
    """What became of a region, for its report."""
    calls = sum(map(_is_ours, graph.graph.nodes))
    if calls:
        return (f"{calls} calls of zentorch's operators",)
    return ("no operand is a parameter or buffer, so there was nothing to pack: ATen's calls",)
