"""From a lowered region to one that replays CUDA graphs, as a whole or in parts, or why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule

from fuseboard import LoweredRegion, Region
from fuseboard_cudagraphs._cut import Boxed, Cuts, cut_region, run_parts
from fuseboard_cudagraphs._device import Device, cuda_device
from fuseboard_cudagraphs._options import Options
from fuseboard_cudagraphs._region import Inputs, is_wanted, why_not_region
from fuseboard_cudagraphs._replay import Replayed

#: Compiles a part of a region, whose static inputs are at these positions.
LowerPart = Callable[[GraphModule, Sequence[int]], Boxed]


def wrap_region(
    lowered: LoweredRegion,
    region: Region,
    options: Options,
    tell: Callable[[str | BaseException], None],
    lower_part: LowerPart,
    device_of: Callable[[torch.device], Device] = cuda_device,
    device_type: str = "cuda",
) -> LoweredRegion | None:
    """Record the region, or its parts, or add the reason to its notes; None where it isn't wanted.

    :param device_of: makes the device that records; tests give one that needs no GPU, and its
        type in ``device_type``.
    """
    if not options.enabled:
        return None

    def recorded(call: Boxed, region: Region) -> Boxed:
        known = Inputs.of(region, device_type)
        return Replayed(call, known, options, device_of(known.device), tell)

    reason = why_not_region(region, options, device_type)
    if reason is None:
        return LoweredRegion(recorded(lowered.call, region))
    cuts: Cuts | str = ""
    if is_wanted(region, options) and options.max_cuts:
        cuts = cut_region(region, options, device_type)
    if isinstance(cuts, str):
        more = f"; {cuts}" if cuts else ""
        return dataclasses.replace(lowered, notes=(f"CUDA graphs skipped: {reason}{more}",))
    calls = []
    for part in cuts.parts:
        call = lower_part(part.region.graph, part.region.static_inputs)
        calls.append(recorded(call, part.region) if part.recorded else call)
    return LoweredRegion(run_parts(cuts.parts, calls, region.graph), notes=(cuts.note,))
