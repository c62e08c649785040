"""Compile regions with Apache TVM (Relax), through an op layer of this plugin's own.

Needs the extra ``tvm``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

import fuseboard


@fuseboard.hookimpl
def fuseboard_backend() -> fuseboard.BackendInfo:
    """Inference and training on the CPU, where TVM is installed in a version that was tried."""
    from fuseboard_tvm import _engine

    reason = _engine.why_unavailable()
    return fuseboard.BackendInfo(
        name="tvm",
        device_types=frozenset({"cpu"}),
        training=True,
        compiles_quickly=True,
        by_request=True,
        may_crash=True,
        available=not reason,
        reason=reason,
        fingerprint="" if reason else _engine.fingerprint(),
        distributions=(*_engine.TVM.installed, *_engine.FFI.installed),
    )


@fuseboard.hookimpl
def fuseboard_claim(graph: GraphModule) -> list[fuseboard.Claim | fuseboard.Decline]:
    """What the op layer has."""
    from fuseboard_tvm import _engine

    _engine.load()
    from fuseboard_tvm._claim import claim

    return claim(graph)


@fuseboard.hookimpl
def fuseboard_lower(
    region: fuseboard.Region, inputs: Sequence[Any]
) -> fuseboard.LoweredRegion | None:
    """One compiled module a region."""
    if region.backend != "tvm":
        return None
    from fuseboard_tvm import _engine

    _engine.load()
    from fuseboard_tvm._lower import lower_region

    return lower_region(region)


@fuseboard.hookimpl
def fuseboard_load(
    artifact: bytes, region: fuseboard.Region, inputs: Sequence[Any]
) -> fuseboard.LoweredRegion | None:
    """A library that an earlier process wrote."""
    return fuseboard.LoweredRegion(call=loaded(artifact))


def loaded(artifact: bytes) -> Any:
    """The callable of a region that an earlier process compiled."""
    from fuseboard_tvm import _engine

    _engine.load()
    from fuseboard_tvm._lower import load_call

    return load_call(artifact)
