"""Norms of half values with float32 weights, as autocast makes them in training, on CPU.

Torch's kernels compute the statistics of such a norm in float32 and return them so; its fake ones
say that they are halves (``torch/_refs`` and ``torch/_decomp/decompositions.py`` of 2.13 cast them
to the input's dtype). They are saved for the backward, which a compiler would then compile for
numbers that don't come. The fake backward of a group norm has another dtype than the kernel's, too.
So they are captured as what they compute: the norm in float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten

#: Norms, by how many leading arguments may be halves.
_NORMS = {
    aten.native_layer_norm.default: 1,
    aten.native_group_norm.default: 1,
    aten.native_group_norm_backward.default: 2,
    aten.native_batch_norm.default: 1,
    aten._native_batch_norm_legit.default: 1,
    aten._native_batch_norm_legit.no_stats: 1,
    aten._native_batch_norm_legit_functional.default: 1,
    aten._native_batch_norm_legit_no_training.default: 1,
}
_HALVES = (torch.float16, torch.bfloat16)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions to capture a joint graph with."""
    return {op: partial(_in_float32, op, halves) for op, halves in _NORMS.items()}


def _in_float32(op: Any, halves: int, *args: Any, **kwargs: Any) -> Any:
    """What ``op`` returns for such arguments; as it is for others."""
    value, others = args[0], [a for a in args[halves:] if isinstance(a, torch.Tensor)]
    mixed = any(other.dtype == torch.float32 for other in others)
    if value.device.type != "cpu" or value.dtype not in _HALVES or not mixed:
        return NotImplemented
    result, *statistics = op(*(a.float() for a in args[:halves]), *args[halves:], **kwargs)
    return (None if result is None else result.to(value.dtype), *statistics)
