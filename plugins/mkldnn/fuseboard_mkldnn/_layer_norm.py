"""Layer norms that are written out: ATen's kernel computes each in one pass over its rows."""

from __future__ import annotations

from torch.fx import GraphModule, Node

import fuseboard
from fuseboard_mkldnn._conv import has_good_dtypes
from fuseboard_mkldnn._graph import aten, is_contiguous, is_empty, tensor


def layer_norms(graph: GraphModule) -> list[fuseboard.Composite]:
    """Those that the kernel can stand for."""
    return fuseboard.find_composites(graph, {"layer_norm"}, _fits)


def _fits(found: fuseboard.Composite) -> bool:
    """Of one dtype, row by row in memory, as the kernel's result is."""
    if found.form == str(aten.native_layer_norm.default) or found.results.keys() != {"y"}:
        return False
    given = [value for value in found.arguments.values() if isinstance(value, Node)]
    values = [tensor(node) for node in (*given, found.results["y"])]
    if any(one is None or is_empty(one) or not is_contiguous(one) for one in values):
        return False
    if not isinstance(values[0].shape[-1], int):
        return False
    return has_good_dtypes(*values) and len({one.dtype for one in values}) == 1
