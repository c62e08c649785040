"""The ops that PT2E writes quantised graphs with, which ``import torch`` leaves out.

``torch.ops.quantized_decomposed`` is defined by ``torch/ao/quantization/fx/_decomposed.py``, read
in torch 2.13; torchao's PT2E imports it from there.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

_HOME = "torch.ao.quantization.fx._decomposed"

#: Op → the overload that is used, and the names of its arguments.
_EXPECTED = {
    ("choose_qparams", "tensor"): "input quant_min quant_max eps dtype",
    ("quantize_per_tensor", "tensor"): "input scale zero_point quant_min quant_max dtype",
    ("dequantize_per_tensor", "tensor"): (
        "input scale zero_point quant_min quant_max dtype out_dtype"
    ),
    ("quantize_per_channel", "default"): (
        "input scales zero_points axis quant_min quant_max dtype"
    ),
    ("dequantize_per_channel", "default"): (
        "input scales zero_points axis quant_min quant_max dtype out_dtype"
    ),
}


@functools.cache
def quantised_ops() -> Any:
    """The namespace of the ops, or None where this torch hasn't them as they were read."""
    try:
        importlib.import_module(_HOME)
    except ImportError:
        return None
    found = torch.ops.quantized_decomposed
    for (name, overload), arguments in _EXPECTED.items():
        op = getattr(getattr(found, name, None), overload, None)
        if op is None or " ".join(one.name for one in op._schema.arguments) != arguments:
            return None
    return found
