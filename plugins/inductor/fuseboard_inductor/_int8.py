"""Quantised products that frozen code would get wrong: where oneDNN's int8 kernels aren't exact.

Read against torch 2.13: ``torch/_inductor/fx_passes/quantization.py``, which puts a product between
dequantise and quantise into one kernel.
"""

from __future__ import annotations

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
        if fuseboard.cuts_off_int8_sums():
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
