"""Run regions through ONNX Runtime. Needs the ``onnxruntime`` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

import fuseboard
from fuseboard_onnxruntime import _availability


@fuseboard.hookimpl
def fuseboard_backend() -> fuseboard.BackendInfo:
    """Forward, backward and inference on the CPU, in float32, with symbolic sizes."""
    from fuseboard_onnxruntime._options import Options

    reason = _availability.why_unavailable()
    return fuseboard.BackendInfo(
        name="onnxruntime",
        device_types=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32}),
        training=True,
        dynamic_shapes=True,
        compiles_quickly=True,
        by_measurement=True,
        may_crash=True,
        available=not reason,
        reason=reason,
        fingerprint="" if reason else _availability.fingerprint(),
        distributions=_availability.runtime(),
        options=Options,
    )


@fuseboard.hookimpl
def fuseboard_claim(graph: GraphModule, kind: str) -> list[fuseboard.Claim | fuseboard.Decline]:
    """What is in the op table."""
    from fuseboard_onnxruntime._claim import claim

    return claim(graph, kind)


@fuseboard.hookimpl
def fuseboard_fuse(
    graph: GraphModule, region: fuseboard.Region | None
) -> list[fuseboard.Fusion] | None:
    """Weights into sessions, in this backend's own regions."""
    if region is None or region.backend != "onnxruntime":
        return None
    from fuseboard_onnxruntime._lower import fuse

    return fuse(graph, region)


@fuseboard.hookimpl
def fuseboard_lower(
    region: fuseboard.Region, inputs: Sequence[Any]
) -> fuseboard.LoweredRegion | None:
    """An ONNX model and its session."""
    if region.backend != "onnxruntime":
        return None
    from fuseboard_onnxruntime._lower import lower_region

    return lower_region(region)


@fuseboard.hookimpl
def fuseboard_load(
    artifact: bytes, region: fuseboard.Region, inputs: Sequence[Any]
) -> fuseboard.LoweredRegion | None:
    """The same from a model that was converted before: no retrace, no conversion."""
    from fuseboard_onnxruntime._lower import lower_region
    from fuseboard_onnxruntime._model import Model

    return lower_region(region, Model.from_bytes(artifact))


@fuseboard.hookimpl
def fuseboard_export(
    graph: GraphModule,
    inputs: Sequence[Any],
    names: Sequence[str],
    weights: Sequence[int],
    path: Path,
    options: Any,
) -> tuple[Any, ...] | None:
    """An ONNX file, where the path ends in ``.onnx``."""
    if path.suffix != ".onnx":
        return None
    from fuseboard_onnxruntime._export import export

    return export(graph, inputs, names, weights, path, options)
