"""Run inference regions on OpenVINO's CPU plugin, in exact float32.

This module is imported whenever plugins are looked for: OpenVINO loads with the first region.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

import fuseboard
from fuseboard_openvino._options import Options

#: The oldest is the first whose frontend takes ATen graphs the way this plugin gives them.
ENGINE = fuseboard.Engine("OpenVINO", at_least="2026.2")


@fuseboard.hookimpl
def fuseboard_backend() -> fuseboard.BackendInfo:
    """Inference on the CPU, static shapes, float32 values; named by request."""
    reason = fuseboard.why_unavailable(ENGINE, install="pip install 'openvino>=2026.2'")
    return fuseboard.BackendInfo(
        name="openvino",
        device_types=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32}),
        compiles_quickly=True,
        by_request=True,
        available=not reason,
        reason=reason,
        fingerprint=f"openvino {ENGINE.version}",
        options=Options,
    )


@fuseboard.hookimpl
def fuseboard_claim(graph: GraphModule) -> list[fuseboard.Claim | fuseboard.Decline]:
    """What the conversion is proven for; products, norms and attention are better than eager's."""
    from fuseboard_openvino._claim import claim

    return claim(graph)


@fuseboard.hookimpl
def fuseboard_fuse(
    graph: GraphModule, kind: str, region: fuseboard.Region | None, options: Any
) -> list[fuseboard.Fusion] | None:
    """A region becomes two calls: compile the model around its weights, and run it."""
    if region is None or region.backend != "openvino":
        return None
    from fuseboard_openvino._region import as_calls

    return as_calls(graph, region, options)


@fuseboard.hookimpl
def fuseboard_lower(
    region: fuseboard.Region, inputs: Sequence[Any]
) -> fuseboard.LoweredRegion | None:
    """The two calls, as flat code; the first is the board's to keep for each set of weights."""
    if region.backend != "openvino":
        return None
    from fuseboard_openvino._region import lower

    return lower(region)
