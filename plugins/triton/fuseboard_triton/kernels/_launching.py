"""What the written kernels have in common: block sizes, numbers of warps, how they are launched."""

from __future__ import annotations

from typing import Any

import torch

#: A row of up to so many elements is held in registers.
LONGEST_ROW = 16384

#: Set for every kernel here: ``a * b + c`` is rounded once. Triton's default has changed before.
OPTIONS = {"enable_fp_fusion": True}


def power_of_two(number: int) -> int:
    """The smallest that isn't less."""
    return 1 << max(number - 1, 0).bit_length()


def warps_for(block: int) -> int:
    """A warp for each 256 elements of a block, from one to 16."""
    return min(max(block // 256, 1), 16)


def rows_of(x: torch.Tensor) -> tuple[int, int]:
    """A contiguous tensor as rows of its last dimension: how many, how long."""
    width = x.shape[-1]
    return (x.numel() // width if width else 0), width


def programs_for(rows: int, device: torch.device) -> int:
    """How many programs share rows among themselves where each also sums over its own."""
    if device.type != "cuda":
        return min(rows, 4)
    return min(rows, 4 * torch.cuda.get_device_properties(device).multi_processor_count)


def options_for(block: int) -> dict[str, Any]:
    return {"num_warps": warps_for(block), **OPTIONS}
