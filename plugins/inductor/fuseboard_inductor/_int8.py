"""Quantised products that frozen code would get wrong: where oneDNN's int8 kernels aren't exact.

Read against torch 2.13: ``torch/_inductor/fx_passes/quantization.py``, which puts a product between
dequantise and quantise into one kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.fx import Node

import fuseboard

#: The largest activation of which a pair of products with int8 always fits into 16 bits.
_LARGEST = 128


def why_not(node: Node) -> str:
    """Why a quantised op isn't to be frozen; "" where it may be."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    if name == "quantized_decomposed::quantize_per_tensor" and _is_narrow(node):
        return "Inductor's int8 products cut results off at the ends of their dtype alone"
    if name == "quantized_decomposed::dequantize_per_tensor" and _reaches_beyond(node):
        if is_cut_off():
            return "oneDNN adds int8 products in pairs, in 16 bits, on a CPU without VNNI"
    return ""


def _is_narrow(node: Node) -> bool:
    """Whether the result of something that is computed is rounded to a part of a dtype's range."""
    low, high, dtype = node.args[3:6]
    read: Any = node.args[0]
    limits = torch.iinfo(dtype)  # type: ignore[arg-type]
    return read.op != "placeholder" and (low, high) != (limits.min, limits.max)


def _reaches_beyond(node: Node) -> bool:
    held: Any = node.args[0]
    value = held.meta.get("val")
    high: Any = node.args[4]
    return value is not None and value.dtype == torch.uint8 and high > _LARGEST


@cache
def is_cut_off() -> bool:
    """Whether a sum of products comes out wrong on this CPU."""
    operators: Any = torch.ops.onednn
    if not hasattr(operators, "qlinear_prepack") or not torch.backends.mkldnn.is_available():
        return False  # there are no such kernels
    with fuseboard.real_tensors():
        x = torch.full((16, 64), 255, dtype=torch.uint8, device="cpu")
        weight = torch.full((32, 64), 127, dtype=torch.int8, device="cpu")
        scales = torch.ones(32, device="cpu")
        zeros = torch.zeros(32, dtype=torch.int32, device="cpu")
        packed = operators.qlinear_prepack(weight, [16, 64])
        further = (None, 1.0, 0, torch.float32, "none", [], "")
        sums = operators.qlinear_pointwise(x, 1.0, 0, packed, scales, zeros, *further)
        return bool((sums != 64 * 255 * 127).any())
