"""A rewritten region as flat code that calls torch's operators."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.fx import GraphModule

import fuseboard
from fuseboard_mkldnn._bindings import bind
from fuseboard_mkldnn._exact import Guard, fast_copy
from fuseboard_mkldnn._graph import aten
from fuseboard_mkldnn._int8_values import keep_integers
from fuseboard_mkldnn._layer_norm import layer_norms
from fuseboard_mkldnn._layout import sink_conversions
from fuseboard_mkldnn._memory import compute_once, drop_copies, join_views, write_in_place


def lower_region(region: fuseboard.Region) -> fuseboard.LoweredRegion:
    """Tidy the rewritten graph, and turn it into code; twice where NaN must be kept apart."""
    norms = layer_norms(region.graph)
    notes = (f"composite layer_norm ×{len(norms)}",) if norms else ()
    for found in norms:
        x, weight, eps, _, bias = found.arguments.values()
        args = (x, [x.meta["val"].shape[-1]], weight, bias, eps)
        kernel = aten.native_layer_norm.default
        fuseboard.replace_composite(region.graph, found, kernel, args, {0: found.results["y"]})
    fast = fast_copy(region.graph)
    exact = _lower_graph(region, region.graph)
    if fast is None:
        return dataclasses.replace(exact, notes=(*exact.notes, *notes))
    graph, guard = fast
    return fuseboard.LoweredRegion(
        call=_Guarded(_lower_graph(region, graph).call, exact.call, guard),
        notes=(
            *exact.notes,
            "relu and clip are fused where inputs and weights are finite, else they run apart",
            *notes,
        ),
    )


def _lower_graph(region: fuseboard.Region, graph: GraphModule) -> fuseboard.LoweredRegion:
    compute_once(graph)
    drop_copies(graph)
    join_views(graph)
    sink_conversions(graph)
    note = keep_integers(graph)
    write_in_place(graph)
    bind(graph)
    graph.recompile()
    lowered = fuseboard.lower_eagerly(dataclasses.replace(region, graph=graph))
    return dataclasses.replace(lowered, notes=(note,) if note else ())


@dataclasses.dataclass(frozen=True)
class _Guarded:
    """A call by one of two ways."""

    fast: Any
    exact: Any
    guard: Guard

    def __call__(self, args: list[Any]) -> Any:
        return self.fast(args) if self.guard.holds(args) else self.exact(args)
