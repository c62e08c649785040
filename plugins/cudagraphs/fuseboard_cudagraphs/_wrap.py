"""From a lowered region to one that replays CUDA graphs, or to the reason why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from fuseboard import LoweredRegion, Region
from fuseboard_cudagraphs._device import Device, cuda_device
from fuseboard_cudagraphs._options import Options
from fuseboard_cudagraphs._region import Inputs, why_not_region
from fuseboard_cudagraphs._replay import Replayed


def wrap_region(
    lowered: LoweredRegion,
    region: Region,
    options: Options,
    tell: Callable[[str | BaseException], None],
    device_of: Callable[[torch.device], Device] = cuda_device,
    device_type: str = "cuda",
) -> LoweredRegion | None:
    """Record the region, or add the reason to its notes; None where it isn't wanted at all.

    :param device_of: makes the device that records; tests give one that needs no GPU, and its
        type in ``device_type``.
    """
    if not options.enabled:
        return None
    reason = why_not_region(region, options, device_type)
    if reason is not None:
        return dataclasses.replace(lowered, notes=(f"CUDA graphs skipped: {reason}",))
    known = Inputs.of(region, device_type)
    return LoweredRegion(
        Replayed(lowered.call, known, options, device_of(known.device), tell),
    )
