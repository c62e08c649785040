"""The op table: what this backend runs, and on what conditions.

An op is here because ``tests/plugins/test_onnxruntime_ops.py`` holds it against float64. Each has
an ONNX form, of torch's library or of :mod:`fuseboard_onnxruntime._translations`, or is brought
down to such ops first (:mod:`fuseboard_onnxruntime._decompositions`, ``_forms``).
"""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch.fx import Node

import fuseboard
from fuseboard_onnxruntime import _conditions as when
from fuseboard_onnxruntime._dtypes import SMALL_INTEGERS, is_supported
from fuseboard_onnxruntime._torch_internals import quantised_ops

#: Names in ``torch.ops.aten``, and the condition under which they are taken.
TABLE: tuple[tuple[str, when.Condition | None], ...] = (
    # pointwise
    (
        "abs acos acosh asin asinh atan atanh cos cosh erf exp exp2 log log10 log2 log1p expm1 "
        "sigmoid sin sinh sqrt tan tanh rsqrt reciprocal isinf logical_not",
        None,
    ),
    ("ceil floor round trunc frac isnan", when.floats_only),
    (
        "gelu silu mish celu leaky_relu softplus hardsigmoid hardswish hardtanh relu ",
        when.floats_only,
    ),
    ("elu", when.elu),
    (
        "add.Tensor add.Scalar sub.Tensor rsub.Scalar mul.Tensor maximum minimum neg sign",
        when.no_bool,
    ),
    ("clamp clamp_min clamp_max", when.no_bool),
    ("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_not", None),
    ("div.Tensor", None),
    ("remainder.Scalar floor_divide", when.safe_division),
    ("pow.Tensor_Scalar pow.Tensor_Tensor", when.power),
    ("addcmul addcdiv lerp.Scalar lerp.Tensor", when.floats_only),
    (
        "eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor "
        "gt.Scalar gt.Tensor ge.Scalar ge.Tensor",
        when.comparison,
    ),
    ("logical_and logical_or logical_xor", when.bools_only),
    ("where.self masked_fill.Scalar", when.no_bool_result),
    # gradients of these
    (
        "tanh_backward sigmoid_backward silu_backward gelu_backward leaky_relu_backward",
        when.floats_only,
    ),
    ("threshold_backward hardtanh_backward", when.equal_strides),
    ("_softmax_backward_data _log_softmax_backward_data", when.softmax_gradient),
    # reductions
    ("sum sum.dim_IntList", when.sum_of),
    ("cumsum", when.short),
    ("mean mean.dim logsumexp", when.mean_of),
    ("var.correction std.correction var_mean.correction", when.variance),
    ("linalg_vector_norm", when.norm_order),
    ("amax amin argmax argmin", when.extremes),
    ("any.dim all.dim", when.over_a_dimension),
    ("all any", when.not_empty),
    ("_softmax _log_softmax", when.not_empty),
    # shapes
    (
        "view _unsafe_view unsqueeze squeeze squeeze.dim squeeze.dims expand permute t "
        "transpose.int select.int slice.Tensor alias detach clone lift_fresh_copy "
        "split_with_sizes repeat stack _to_copy",
        None,
    ),
    ("roll", when.known_shifts),
    ("flip", when.has_dimensions),
    ("cat", when.something),
    ("split.Tensor", when.known_parts),
    ("unbind.int", when.known_count),
    ("constant_pad_nd", when.zero_dims),
    ("tril triu", when.matrices),
    ("select_backward slice_backward", None),
    # constants
    (
        "zeros_like ones_like full_like zeros ones full new_zeros new_ones new_full scalar_tensor",
        None,
    ),
    ("arange arange.start arange.start_step", when.whole_steps),
    # looking up
    ("embedding index_select gather", None),
    ("index.Tensor", when.real_index),
    ("nll_loss_forward nll_loss_backward", when.items),
    # products
    ("addmm mm bmm baddbmm", when.floats_only),
    ("convolution", when.convolution),
    ("_scaled_dot_product_flash_attention_for_cpu", when.attention),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", when.attention_backward),
    # norms and pools
    ("_native_batch_norm_legit_no_training", when.batch_norm),
    ("_native_batch_norm_legit_functional native_batch_norm_backward", when.statistics),
    ("native_layer_norm", when.layer_norm),
    ("native_layer_norm_backward", when.rows),
    ("native_group_norm", when.group_norm),
    ("max_pool2d_with_indices", when.pooling),
    ("avg_pool2d", when.average_pooling),
    ("_adaptive_avg_pool2d", when.adaptive_pooling),
    ("mse_loss", when.mean_loss),
)

#: The same in ``torch.ops.quantized_decomposed``.
QUANTISED: tuple[tuple[str, when.Condition | None], ...] = (
    ("quantize_per_tensor dequantize_per_tensor", when.known_grid),
    ("dequantize_per_channel", when.known_channels),
)


@cache
def table() -> dict[Any, when.Condition | None]:
    """Op → condition."""
    found: dict[Any, when.Condition | None] = {operator.getitem: None}
    for names, condition in TABLE:
        found.update(dict.fromkeys(overloads(torch.ops.aten, names), condition))
    if (quantised := quantised_ops()) is not None:
        for names, condition in QUANTISED:
            found.update(dict.fromkeys(overloads(quantised, names), condition))
    return {**found, **dict.fromkeys(fuseboard.OWN_OPS, when.one_result)}


def overloads(namespace: Any, names: str) -> list[Any]:
    """Ops by their names; another torch may lack one."""
    found = []
    for name in names.split():
        packet, _, overload = name.partition(".")
        found.append(getattr(getattr(namespace, packet, None), overload or "default", None))
    return [op for op in found if op is not None]


def why_not(node: Node) -> str | None:
    """The reason to decline a node, or None."""
    target: Any = node.target
    if target not in table():
        return _why_unknown(target)
    for used in (*node.all_input_nodes, node):
        value = used.meta.get("val")
        for one in value if isinstance(value, list | tuple) else (value,):
            reason = _why_value(one, target)
            if reason is not None:
                return reason
    condition = table()[target]
    return None if condition is None else condition(node)


def _why_unknown(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_seeded in target.tags:
            return "it draws random numbers; ONNX Runtime would draw others"
        if target is torch.ops.aten.convolution_backward.default:
            return "ONNX Runtime's transposed convolution is several times slower than eager's"
        return f"{target.name()} isn't in the op table: no ONNX form of it is proven"
    return f"{target!r} isn't an op of the table"


def _why_value(value: Any, target: Any) -> str | None:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return f"layout {value.layout}"
        if not is_supported(value.dtype):
            return f"dtype {value.dtype} isn't proven"
        if value.dtype in SMALL_INTEGERS and not _takes_small_integers(target):
            return f"dtype {value.dtype}: ONNX Runtime lacks many kernels for it"
        if when.has_unbacked_symbols(value):
            return "its size is known only from data"
    elif isinstance(value, torch.SymFloat | torch.SymBool | float | bool):
        return f"a {type(value).__name__} as a value"
    return None


def _takes_small_integers(target: Any) -> bool:
    return target in _FOR_SMALL_INTEGERS or target.namespace == "quantized_decomposed"


_FOR_SMALL_INTEGERS = frozenset(
    {
        operator.getitem,
        torch.ops.aten._to_copy.default,
        torch.ops.aten.view.default,
        torch.ops.aten.permute.default,
        torch.ops.aten.unsqueeze.default,
    }
)
