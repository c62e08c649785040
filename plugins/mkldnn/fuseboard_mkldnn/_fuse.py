"""All rewrites of one region."""

from __future__ import annotations

from torch.fx import GraphModule, Node

import fuseboard
from fuseboard_mkldnn._conv import fuse_convolutions
from fuseboard_mkldnn._graph import static_nodes
from fuseboard_mkldnn._linear import fuse_linears
from fuseboard_mkldnn._lstm import fuse_lstms
from fuseboard_mkldnn._options import Options
from fuseboard_mkldnn._pack import Budget
from fuseboard_mkldnn._quantised import fuse_quantised
from fuseboard_mkldnn._weight_only import fuse_weight_only


def fuse_region(
    graph: GraphModule, region: fuseboard.Region, options: Options | None
) -> list[fuseboard.Fusion]:
    """Convolutions, LSTM layers and linear layers; no node is in two rewrites.

    Quantised weights aren't packed as the floats that they stand for.
    """
    options = options or Options()
    static = static_nodes(graph, region.static_inputs)
    budget = Budget(options.measure_budget_s)
    taken: set[Node] = set()
    quantised = fuse_quantised(graph, static, taken)
    weight_only = fuse_weight_only(graph, static, taken, options, budget)
    static = static_nodes(graph, region.static_inputs, but=fuseboard.widens)
    return [
        *quantised,
        *weight_only,
        *fuse_convolutions(graph, static, taken, options, budget),
        *fuse_lstms(graph, static, taken, options, budget),
        *fuse_linears(graph, static, taken, options, budget),
    ]
