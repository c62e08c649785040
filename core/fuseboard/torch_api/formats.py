"""Which number formats a device computes in by instructions of its own.

torch computes in any format anywhere: where there are no instructions it casts, which is slower
than float32. Read against torch 2.13: ``torch/cpu/__init__.py``, ``aten/src/ATen/cpu/Utils.cpp``,
``aten/src/ATen/native/mkldnn/Utils.h`` (``mkldnn_bf16_device_check`` and its like).
"""

from __future__ import annotations

import functools
import platform
from typing import Any

import torch

from fuseboard.torch_api.internals import real_tensors

#: Of x86. oneDNN says that it supports bfloat16 wherever there is AVX-512, and casts there.
_X86_BFLOAT16 = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
_ONEDNN = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


@functools.cache
def has_products_of(dtype: torch.dtype, device_type: str) -> bool:
    """Whether products of a half type have instructions."""
    if device_type == "cuda":
        return dtype != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type != "cpu":
        return False
    if dtype == torch.bfloat16 and platform.machine().lower() in ("x86_64", "amd64"):
        return any(_says(torch.cpu, name) for name in _X86_BFLOAT16)
    return _says(torch.ops.mkldnn, _ONEDNN[dtype])


@functools.cache
def cuts_off_int8_sums() -> bool:
    """Whether oneDNN's int8 products come out wrong on this CPU, as on those without VNNI.

    These add pairs of products of two bytes in 16 bits, and cut off what is larger. It is found by
    a small product, of which each sum would be.
    """
    operators: Any = torch.ops.onednn
    if not hasattr(operators, "qlinear_prepack") or not torch.backends.mkldnn.is_available():
        return False  # there are no such kernels
    with real_tensors():
        x = torch.full((16, 64), 255, dtype=torch.uint8, device="cpu")
        weight = torch.full((32, 64), 127, dtype=torch.int8, device="cpu")
        scales = torch.ones(32, dtype=torch.float32, device="cpu")  # whatever the default is
        zeros = torch.zeros(32, dtype=torch.int32, device="cpu")
        packed = operators.qlinear_prepack(weight, [16, 64])
        further: Any = (None, 1.0, 0, torch.float32, "none", [], "")
        sums = operators.qlinear_pointwise(x, 1.0, 0, packed, scales, zeros, *further)
        return bool((sums != 64 * 255 * 127).any())


@functools.cache
def int4_product() -> Any:
    """ATen's product by packed weights of 4 bits; None where this CPU has no vector kernel for it.

    ``aten/src/ATen/native/cpu/int4mm_kernel.cpp`` has some for AVX2 and AVX-512 (torch 2.13).
    """
    product: Any = getattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu", None)
    has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if product is None or not has_vectors:
        return None
    names = [one.name for one in product.default._schema.arguments]
    packs = hasattr(torch.ops.aten, "_convert_weight_to_int4pack_for_cpu")
    as_read = names == ["self", "mat2", "qGroupSize", "qScaleAndZeros"]
    return product.default if packs and as_read else None


def _says(owner: Any, name: str) -> bool:
    """What a probe says, where this torch has it."""
    probe = getattr(owner, name, None)
    return probe is not None and bool(probe())
