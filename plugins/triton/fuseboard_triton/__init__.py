"""Generate and run Triton kernels on a CUDA GPU. Needs the ``triton`` extra.

Pointwise ops and reductions of a region are put into as few kernels as they fit into; norms, rotary
embeddings and cross entropy have kernels written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

import fuseboard
from fuseboard_triton import _availability
from fuseboard_triton._options import Options


@fuseboard.hookimpl
def fuseboard_backend() -> fuseboard.BackendInfo:
    """CUDA, training, symbolic sizes; on the CPU only in Triton's interpreter."""
    reason = _availability.why_unavailable()
    return fuseboard.BackendInfo(
        name="triton",
        device_types=frozenset({"cpu", "cuda"} if _availability.interpreting() else {"cuda"}),
        dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16}),
        training=True,
        dynamic_shapes=True,
        compiles_quickly=True,
        by_request=True,
        available=not reason,
        reason=reason,
        fingerprint="" if reason else _availability.fingerprint(),
        options=Options,
    )


@fuseboard.hookimpl
def fuseboard_claim(graph: GraphModule, options: Any) -> list[fuseboard.Claim | fuseboard.Decline]:
    """What kernels compute, and the views between."""
    from fuseboard_triton._claim import claim

    return claim(graph, options)


@fuseboard.hookimpl
def fuseboard_lower(
    region: fuseboard.Region, inputs: Sequence[Any]
) -> fuseboard.LoweredRegion | None:
    """Kernels and the code that launches them."""
    if region.backend != "triton":
        return None
    from fuseboard_triton._lower import lower_region

    return lower_region(region)
