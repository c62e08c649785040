"""torch's oneDNN and MKL operators: the one module of this plugin that reaches private APIs.

Read against torch 2.13 (``aten/src/ATen/native/mkldnn/{Linear,Conv}.cpp``,
``torch/_inductor/fx_passes/mkldnn_fusion.py``, ``torch/_meta_registrations.py``). The operators
are registered in C++ without a promise of stability, so their presence and the names of their
arguments are probed; versions are never compared.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import fuseboard

#: Where torch keeps the functions behind ``torch.nn.functional``: calling them from Python costs
#: half of what calling an ``OpOverload`` costs.
nn: Any = torch._C._nn

#: Operator → argument names that the rewrites rely on, in order.
EXPECTED = {
    "mkldnn::_linear_pointwise": ("X", "W", "B", "attr", "scalars", "algorithm"),
    "mkldnn::_linear_pointwise.binary": ("X", "other", "W", "B", "attr"),
    "mkldnn::_reorder_linear_weight": ("self", "batch_size"),
    "mkldnn::_convolution_pointwise": (
        *("X", "W", "B", "padding", "stride", "dilation", "groups"),
        *("attr", "scalars", "algorithm"),
    ),
    "mkldnn::_convolution_pointwise.binary": (
        *("X", "other", "W", "B", "padding", "stride", "dilation", "groups"),
        *("binary_attr", "alpha", "unary_attr", "unary_scalars", "unary_algorithm"),
    ),
    "mkldnn::_convolution_pointwise_.binary": (
        *("other", "X", "W", "B", "padding", "stride", "dilation", "groups"),
        *("binary_attr", "alpha", "unary_attr", "unary_scalars", "unary_algorithm"),
    ),
    "mkldnn::_reorder_convolution_weight": (
        *("self", "padding", "stride", "dilation", "groups", "input_size"),
    ),
}
#: The same for MKL's packed product, which builds without MKL don't have; it is optional.
EXPECTED_MKL = {
    "mkl::_mkl_linear": ("X", "MKL_W", "ORI_W", "B", "batch_size"),
    "mkl::_mkl_reorder_linear_weight": ("X", "batch_size"),
}
#: The same for transposed convolutions and for LSTM layers, each optional.
EXPECTED_TRANSPOSED = {
    "mkldnn::_convolution_transpose_pointwise": (
        *("X", "W", "B", "padding", "output_padding", "stride", "dilation", "groups"),
        *("attr", "scalars", "algorithm"),
    ),
    "mkldnn::_reorder_convolution_transpose_weight": (
        *("self", "padding", "output_padding", "stride", "dilation", "groups", "input_size"),
    ),
}
EXPECTED_LSTM = {
    "aten::mkldnn_rnn_layer": (
        *("input", "weight0", "weight1", "weight2", "weight3", "hx_", "cx_", "reverse"),
        *("batch_sizes", "mode", "hidden_size", "num_layers", "has_biases", "bidirectional"),
        *("batch_first", "train"),
    ),
    "mkldnn::_reorder_mkldnn_rnn_layer_weight": (
        *("weight0", "weight1", "hidden_size", "reverse", "has_biases", "batch_first"),
        "input_size",
    ),
}
#: The same for products of 8-bit integers, which are optional.
EXPECTED_INT8 = {
    "onednn::qlinear_prepack": ("weight", "x_shape"),
    "onednn::qconv_prepack": (
        *("weight", "w_scales", "x_scale", "x_zp", "stride", "padding", "dilation", "groups"),
        "x_shape",
    ),
    **{
        f"onednn::qlinear_pointwise{variant}": (
            *("qx", "x_scale", "x_zero_point", "qw", "w_scale", "w_zero_point", "bias"),
            *("output_scale", "output_zero_point", "output_dtype"),
            *("post_op_name", "post_op_args", "post_op_algorithm"),
        )
        for variant in ("", ".tensor")
    },
    **{
        f"onednn::qlinear_pointwise{variant}": (
            *("qx", "x_scale", "x_zero_point", "qw", "w_scale", "w_zero_point", "other", "bias"),
            *("output_scale", "output_zero_point", "output_dtype", "other_scale", "other_zp"),
            *("binary_post_op", "binary_alpha"),
            *("unary_post_op", "unary_post_op_args", "unary_post_op_algorithm"),
        )
        for variant in (".binary", ".binary_tensor")
    },
    "onednn::qconv_pointwise": (
        *("qx", "x_scale", "x_zero_point", "qw", "w_scale", "w_zero_point", "bias"),
        *("stride", "padding", "dilation", "groups"),
        *("output_scale", "output_zero_point", "output_dtype", "attr", "scalars", "algorithm"),
    ),
    "onednn::qconv2d_pointwise.binary": (
        *("qx", "x_scale", "x_zero_point", "qw", "w_scale", "w_zero_point", "qaccum", "bias"),
        *("stride", "padding", "dilation", "groups"),
        *("output_scale", "output_zero_point", "output_dtype", "accum_scale", "accum_zero_point"),
        *("binary_attr", "alpha", "unary_attr", "unary_scalars", "unary_algorithm"),
    ),
}
#: The same for the product with an int8 weight, (N, K), that has a scale for each of the N.
EXPECTED_WEIGHT_ONLY = {"aten::_weight_int8pack_mm": ("self", "mat2", "scales")}
#: The same for 4 bits, and scales and zeros for groups.
EXPECTED_INT4 = {
    "aten::_convert_weight_to_int4pack_for_cpu": ("self", "innerKTiles"),
    "aten::_weight_int4pack_mm_for_cpu": ("self", "mat2", "qGroupSize", "qScaleAndZeros"),
}


def overload(qualified: str) -> Any:
    """An operator overload by its qualified name, or None where torch hasn't got it."""
    namespace, _, rest = qualified.partition("::")
    name, _, variant = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return getattr(packet, variant or "default", None)


def _differs(qualified: str, expected: tuple[str, ...]) -> bool:
    found = overload(qualified)
    return found is None or tuple(arg.name for arg in found._schema.arguments) != expected


@cache
def why_unavailable() -> str:
    """What this torch lacks, or an empty string."""
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN (torch.backends.mkldnn.is_available() is False)"
    other = sorted(name for name, names in EXPECTED.items() if _differs(name, names))
    if other:
        return f"torch {torch.__version__} has other operators than expected: {', '.join(other)}"
    return ""


@cache
def has_mkl() -> bool:
    """Whether MKL's packed product can be used."""
    return not any(_differs(name, names) for name, names in EXPECTED_MKL.items())


@cache
def transposed_convolution() -> Any:
    """The operator, or None where torch hasn't got it as it is expected."""
    if any(_differs(name, names) for name, names in EXPECTED_TRANSPOSED.items()):
        return None
    return overload("mkldnn::_convolution_transpose_pointwise")


@cache
def lstm_layer() -> Any:
    """The operator of one LSTM layer in one direction; None as above."""
    if any(_differs(name, names) for name, names in EXPECTED_LSTM.items()):
        return None
    return overload("aten::mkldnn_rnn_layer")


@cache
def has_int8() -> bool:
    """Whether products of 8-bit integers can be used."""
    return not any(_differs(name, names) for name, names in EXPECTED_INT8.items())


@cache
def integer_pool() -> Any:
    """The operator that pools integers (ATen's refuses more than 255 of them); None as above."""
    expected = ("qx", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
    differs = _differs("quantized::max_pool2d", expected)
    return None if differs else overload("quantized::max_pool2d")


@cache
def int8_product() -> Any:
    """The operator of a product with an int8 weight; None as above."""
    if any(_differs(name, names) for name, names in EXPECTED_WEIGHT_ONLY.items()):
        return None
    return overload("aten::_weight_int8pack_mm")


@cache
def int4_product() -> tuple[Any, Any] | None:
    """What packs a weight of 4 bits, and the operator of the product; None as above."""
    if any(_differs(name, names) for name, names in EXPECTED_INT4.items()):
        return None
    pack, product = map(overload, EXPECTED_INT4)
    return pack, product


@cache
def bfloat16_supported() -> bool:
    """Whether oneDNN runs bfloat16 on this CPU natively (AVX-512 or better)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def float16_supported() -> bool:
    """Whether oneDNN runs float16 on this CPU natively (AVX-512 FP16, AVX-NE-CONVERT or AMX)."""
    probe = overload("mkldnn::_is_mkldnn_fp16_supported")
    return probe is not None and bool(probe())


def has_kernels(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in a dtype on this CPU."""
    if dtype == torch.bfloat16:
        return bfloat16_supported()
    if dtype == torch.float16:
        return float16_supported()
    return dtype == torch.float32


def why_switched_off() -> str:
    """Why oneDNN isn't to be used now (``torch.backends.mkldnn.flags``); "" if it is."""
    if torch.backends.mkldnn.enabled:
        return ""
    return "oneDNN is switched off: torch.backends.mkldnn.enabled is False"


def precisions() -> tuple[Any, ...]:
    """The switches that change how oneDNN computes; another torch may lack some."""
    library: Any = torch.backends.mkldnn
    parts = [getattr(library, name, None) for name in ("matmul", "conv", "rnn")]
    rounded = [getattr(part, "fp32_precision", None) for part in parts]
    return (library.deterministic, getattr(library, "allow_tf32", None), *rounded)


def fingerprint() -> str:
    """Changes with whatever the choice of kernels depends on."""
    capability = torch.backends.cpu.get_cpu_capability()
    operators = (transposed_convolution(), lstm_layer(), int8_product(), int4_product())
    optional = (
        *(has_mkl(), *(one is not None for one in operators)),
        *(has_int8(), has_int8() and fuseboard.cuts_off_int8_sums()),
    )
    halves = f"bf16={bfloat16_supported()}, fp16={float16_supported()}"
    return f"torch {torch.__version__}, {capability}, {halves}, {optional}"


def size_hint(value: Any) -> int | None:
    """A size in the example that is being compiled; None where only data decide it."""
    if isinstance(value, int):
        return value
    node = value.node
    return int(node.hint) if node.has_hint() else None


def known_equal(left: Any, right: Any) -> bool:
    """Whether two sizes are known to be equal without a new guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return bool(statically_known_true(left == right))


def has_unbacked_symbols(value: Any) -> bool:
    """Whether a fake value has sizes that only data decide."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(value))
