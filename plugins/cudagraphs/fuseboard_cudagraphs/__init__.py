"""CUDA graphs around the regions of other backends: one launch instead of one a kernel.

Off unless ``mode="reduce-overhead"`` or ``plugins.cudagraphs.enabled`` turns it on. Options:
``[tool.fuseboard.plugins.cudagraphs]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fuseboard
from fuseboard_cudagraphs._options import Options


@fuseboard.hookimpl
def fuseboard_backend() -> fuseboard.BackendInfo:
    """Ready where there is a CUDA device; it runs nothing by itself."""
    built = torch.backends.cuda.is_built()
    available = torch.cuda.is_available()
    why = "no CUDA device was found" if built else "this build of torch has no CUDA"
    return fuseboard.BackendInfo(
        name="cudagraphs",
        device_types=frozenset({"cuda"}),
        training=True,
        dynamic_shapes=True,
        wraps_only=True,
        available=available,
        reason="" if available else f"CUDA graphs need a CUDA device: {why}",
        fingerprint=f"{torch.__version__} {torch.version.cuda}",
        options=Options,
    )


@fuseboard.hookimpl
def fuseboard_wrap(
    lowered: fuseboard.LoweredRegion,
    region: fuseboard.Region,
    options: Any,
    tell: Callable[[str | BaseException], None],
    lower_part: Callable[..., Any],
) -> fuseboard.LoweredRegion | None:
    """Record the region, or as much of it as can be, if that is wanted."""
    from fuseboard_cudagraphs._wrap import wrap_region

    return wrap_region(lowered, region, options, tell, lower_part)
