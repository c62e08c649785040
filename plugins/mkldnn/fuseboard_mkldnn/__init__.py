"""Run CPU inference through torch's own oneDNN and MKL operators; nothing is compiled.

Convolutions with batch norm folded, linear layers with packed weights, post-operations inside
the kernels. Whatever else lies between runs as in eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

import fuseboard


@fuseboard.hookimpl
def fuseboard_backend() -> fuseboard.BackendInfo:
    """Inference on the CPU, with symbolic sizes."""
    from fuseboard_mkldnn import _ops
    from fuseboard_mkldnn._options import Options

    reason = _ops.why_unavailable()
    return fuseboard.BackendInfo(
        name="mkldnn",
        device_types=frozenset({"cpu"}),
        training=False,
        dynamic_shapes=True,
        compiles_quickly=True,
        available=not reason,
        reason=reason,
        fingerprint="" if reason else _ops.fingerprint(),
        distributions=(),
        options=Options,
    )


@fuseboard.hookimpl
def fuseboard_claim(
    graph: GraphModule, kind: str
) -> list[fuseboard.Claim | fuseboard.Decline] | None:
    """The whole graph, if there is a convolution or a linear layer in it."""
    from fuseboard_mkldnn._claim import claim

    return claim(graph, kind)


@fuseboard.hookimpl
def fuseboard_fuse(
    graph: GraphModule, kind: str, region: fuseboard.Region | None, options: Any
) -> list[fuseboard.Fusion] | None:
    """Rewrites of this backend's own regions."""
    if region is None or region.backend != "mkldnn":
        return None
    from fuseboard_mkldnn._fuse import fuse_region

    return fuse_region(graph, region, options)


@fuseboard.hookimpl
def fuseboard_lower(
    region: fuseboard.Region, inputs: Sequence[Any]
) -> fuseboard.LoweredRegion | None:
    """Flat code that calls torch's operators."""
    if region.backend != "mkldnn":
        return None
    from fuseboard_mkldnn._lower import lower_region

    return lower_region(region)
