"""Run CPU inference on AMD's ZenDNN kernels, through the operators that zentorch brings.

This module is imported whenever plugins are looked for: zentorch's library loads with the first
graph that has something for it.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

import fuseboard
from fuseboard_zentorch._options import Options

#: What the kernels were compared with float64 in.
DTYPES = frozenset({torch.float32, torch.bfloat16})


@fuseboard.hookimpl
def fuseboard_backend() -> fuseboard.BackendInfo:
    """Inference on CPUs with AVX-512, symbolic sizes; a candidate where calls are measured."""
    from fuseboard_zentorch._availability import fingerprint, why_unavailable

    reason = why_unavailable()
    return fuseboard.BackendInfo(
        name="zentorch",
        device_types=frozenset({"cpu"}),
        dtypes=DTYPES,
        dynamic_shapes=True,
        compiles_quickly=True,
        by_measurement=True,
        available=not reason,
        reason=reason,
        fingerprint="" if reason else fingerprint(),
        options=Options,
    )


@fuseboard.hookimpl
def fuseboard_claim(
    graph: GraphModule, options: Options
) -> list[fuseboard.Claim | fuseboard.Decline] | None:
    """Products that are worth it, and what lies between; nothing of a graph without them."""
    from fuseboard_zentorch._claim import claim

    return claim(graph, options)


@fuseboard.hookimpl
def fuseboard_fuse(
    graph: GraphModule, region: fuseboard.Region | None, options: Options
) -> list[fuseboard.Fusion] | None:
    """ZenDNN's operators in the place of ATen's; packing a weight is left to the board to hoist."""
    if region is None or region.backend != "zentorch":
        return None
    from fuseboard_zentorch._rewrite import rewrites

    return rewrites(graph, region.static_inputs, options)


@fuseboard.hookimpl
def fuseboard_lower(region: fuseboard.Region) -> fuseboard.LoweredRegion | None:
    """Flat code that calls the operators."""
    if region.backend != "zentorch":
        return None
    from fuseboard_zentorch._lower import lower

    return lower(region)
