"""Ops that are taken apart by torch's decompositions before they are emitted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import fuseboard
from fuseboard_tvm import _torch_internals
from fuseboard_tvm.ops.registry import overload

#: What each decomposes into is emitted, too; the sweep compares the whole with float64.
DECOMPOSED = """
_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm
native_layer_norm_backward native_group_norm native_group_norm_backward
_native_batch_norm_legit_no_training _native_batch_norm_legit_functional _native_batch_norm_legit
_native_batch_norm_legit.no_stats native_batch_norm_backward gelu gelu_backward silu silu_backward
sigmoid_backward tanh_backward threshold_backward hardtanh hardtanh_backward hardsigmoid
hardsigmoid_backward hardswish hardswish_backward leaky_relu leaky_relu_backward elu elu_backward
celu softplus softplus_backward mish mish_backward log_sigmoid_forward log_sigmoid_backward
_prelu_kernel _prelu_kernel_backward masked_fill.Scalar masked_fill.Tensor addcmul addcdiv
lerp.Scalar lerp.Tensor square stack tril triu roll select_backward slice_backward unfold_backward
mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
nll_loss_forward nll_loss_backward binary_cross_entropy binary_cross_entropy_backward
linalg_vector_norm logsumexp pixel_shuffle glu glu_backward xlogy.Tensor linspace nan_to_num
logaddexp heaviside reflection_pad2d replication_pad2d binary_cross_entropy_with_logits isneginf
isposinf frac std.correction repeat select_scatter
""".split()


@functools.cache
def table() -> dict[Any, Callable[..., Any]]:
    """Op overload → decomposition, for those that this torch has."""
    ops = []
    for name in DECOMPOSED:
        target = overload(f"aten.{name}" if "." in name else f"aten.{name}.default")
        if target is not None:
            ops.append(target)
    return {**_torch_internals.decompositions(ops), **fuseboard.OWN_OPS}
