"""Which kernel torch's attention would run.

Read against torch 2.13: ``aten/src/ATen/native/transformers/attention.cpp``
(``scaled_dot_product_attention``), ``sdp_utils_cpp.cpp`` (``select_sdp_backend_cpp``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: What the ops of fused kernels begin with; without one attention is taken apart into products.
_FUSED = "aten::_scaled_dot_product_"


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> torch.Tensor | None:
    """What ``scaled_dot_product_attention`` returns for fake tensors; None without a fused kernel.

    It depends on sizes, dtypes, what needs gradients, and on what the user has switched off.
    """
    with _Ops() as ops:
        result = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
    fused = any(name.startswith(_FUSED) and "math" not in name for name in ops.names)
    return result if fused else None
