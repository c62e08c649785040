"""Functions as regions of the triton backend, without Dynamo: traced, lowered, called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fuseboard


def trace(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> GraphModule:
    """An ATen graph with fake values whose output is a flat tuple."""

    def flat(*given: torch.Tensor) -> tuple[Any, ...]:
        result = function(*given)
        return tuple(result) if isinstance(result, list | tuple) else (result,)

    with torch.no_grad():
        graph = make_fx(flat, tracing_mode="fake")(*inputs)
    graph.graph.eliminate_dead_code()
    return graph


def region_of(graph: GraphModule) -> fuseboard.Region:
    return fuseboard.Region(
        name="test.region0", backend="triton", kind="inference", graph=graph, signature="test"
    )


def lower(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> tuple[Callable[..., tuple[torch.Tensor, ...]], fuseboard.LoweredRegion]:
    """The function through kernels, and what was lowered."""
    from fuseboard_triton._lower import lower_region

    lowered = lower_region(region_of(trace(function, inputs)))
    return lambda *given: tuple(lowered.call(list(given))), lowered
