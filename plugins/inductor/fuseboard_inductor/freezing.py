"""Inductor with its freezing: weights as constants, for inference on the CPU.

It runs where ``backends`` names it. Options: ``[tool.fuseboard.plugins.inductor-freezing]``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fuseboard
import fuseboard_inductor
from fuseboard import BackendInfo, Claim, Decline, Fusion, LoweredRegion, Region

_NAME = "inductor-freezing"


#: Settings of Inductor's that can't be given, and why.
_TAKEN = {
    **fuseboard_inductor.TAKEN,
    "always_keep_tensor_constants": "code without values serves all weights",
    "cpp_wrapper": "use the backend inductor",
    "freezing": "it is on",
    "freezing_discard_parameters": "the weights stay yours",
    "max_autotune": "it builds the values of weights into the code; use the backend inductor",
    "max_autotune_gemm": "it builds the values of weights into the code; use the backend inductor",
}


class Options(fuseboard_inductor.Configured):
    """What ``[tool.fuseboard.plugins.inductor-freezing]`` may hold."""

    taken = _TAKEN


@fuseboard.hookimpl
def fuseboard_backend() -> BackendInfo:
    """Ready where there is a C++ compiler."""
    info = fuseboard_inductor.fuseboard_backend()
    available = "cpu" in info.device_types
    return dataclasses.replace(
        info,
        name=_NAME,
        device_types=frozenset({"cpu"}),
        training=False,
        dynamic_shapes=False,
        fixes_sizes=False,
        by_request=True,
        available=available,
        reason="" if available else fuseboard_inductor.why_no_compiler(),
        options=Options,
    )


@fuseboard.hookimpl
def fuseboard_decompositions(random: str) -> dict[Any, Callable[..., Any]]:
    """Inductor's own table."""
    from fuseboard_inductor import _compile, _handles  # noqa: F401  # the op in rewritten regions

    return _compile.decomposition_table(random)


@fuseboard.hookimpl
def fuseboard_claim(graph: GraphModule) -> list[Claim | Decline]:
    """What Inductor runs, but for ops whose code depends on the values of weights."""
    return fuseboard.claim_nodes(graph, _why_not)


def _why_not(node: Node) -> str | None:
    from fuseboard_inductor import _int8, _known_wrong

    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return "weights aren't frozen in graphs within a graph"
    if getattr(node.target, "namespace", "") in ("onednn", "quantized"):
        return "Inductor's code for frozen quantized ops holds their scales"
    return _int8.why_not(node) or _known_wrong.why_not(node)


@fuseboard.hookimpl
def fuseboard_fuse(graph: GraphModule, region: Region | None) -> list[Fusion] | None:
    """Weights as constants, in this backend's own regions."""
    if region is None or region.backend != _NAME:
        return None
    from fuseboard_inductor import _handles

    return _handles.rewrites(graph, region)


@fuseboard.hookimpl
def fuseboard_lower(region: Region, inputs: Sequence[Any]) -> LoweredRegion:
    """Compile the region for any weights of these shapes."""
    from fuseboard_inductor import _handles

    return _handles.lower_region(region, inputs)


@fuseboard.hookimpl
def fuseboard_load(artifact: bytes, region: Region, inputs: Sequence[Any]) -> LoweredRegion | None:
    """Take a compiled region from the board's cache, or from a child process."""
    from fuseboard_inductor import _handles

    return _handles.load_region(artifact, region, inputs)
