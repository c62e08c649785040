"""torch's fused attention on CPU, and whether its attention would run that.

Read against torch 2.13: ``aten/src/ATen/native/transformers/attention.cpp``
(``scaled_dot_product_attention``), ``sdp_utils_cpp.cpp`` (``select_sdp_backend_cpp``),
``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"


def cpu_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and of each row the logarithm of the sum that softmax divides by."""
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=bias, scale=scale
    )
    return found  # type: ignore[no-any-return]


def cpu_kernel_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    result: torch.Tensor,
    sums: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, result, sums, 0.0, False, attn_mask=bias, scale=scale
    )
    return found  # type: ignore[no-any-return]


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def below_autograd() -> AbstractContextManager[Any]:
    """For the block, ops are called as autograd calls them: their results have no history.

    ``torch/_library/autograd.py`` (2.13) does as much for a custom op.
    """
    return torch._C._AutoDispatchBelowAutograd()


def is_fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Whether ``scaled_dot_product_attention`` has a fused kernel for fake tensors, on CPU.

    It depends on sizes, dtypes, and on what the user has switched off. A mask's gradient it hasn't.
    """
    # Nothing is saved: hooks of the user's for saved tensors would be called with fake ones.
    with torch.no_grad(), _Ops() as ops:
        torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return _FUSED in ops.names
