"""Half types, for tests of oneDNN."""

from __future__ import annotations

import pytest
import torch

#: Half types, each where oneDNN has kernels for it.
HALVES = [
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(
            not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
            reason="needs a CPU with AVX-512 or AMX",
        ),
    ),
    pytest.param(
        torch.float16,
        marks=pytest.mark.skipif(
            not torch.ops.mkldnn._is_mkldnn_fp16_supported(),
            reason="needs a CPU with AVX-512 FP16, or AVX2 with AVX-NE-CONVERT",
        ),
    ),
]
