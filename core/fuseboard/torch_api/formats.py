"""Which number formats a device computes in by instructions of its own.

torch computes in any format anywhere: where there are no instructions it casts, which is slower
than float32. Read against torch 2.13: ``torch/cpu/__init__.py``, ``aten/src/ATen/cpu/Utils.cpp``,
``aten/src/ATen/native/mkldnn/Utils.h`` (``mkldnn_bf16_device_check``).
"""

from __future__ import annotations

import functools
import platform

import torch

#: Of x86. oneDNN says that it supports bfloat16 wherever there is AVX-512, and casts there.
_X86 = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


@functools.cache
def has_bfloat16(device_type: str) -> bool:
    """Whether products of bfloat16 have instructions."""
    if device_type == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type != "cpu":
        return False
    if platform.machine().lower() in ("x86_64", "amd64"):
        probes = (getattr(torch.cpu, name, None) for name in _X86)
        return any(probe is not None and probe() for probe in probes)
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return probe is not None and bool(probe())
