"""The ops that PT2E writes quantised graphs with, and what lies between them.

``torch.ops.quantized_decomposed`` are defined by ``torch/ao/quantization/fx/_decomposed.py`` (read
in 2.13), which torchao's PT2E imports.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fuseboard_mkldnn._graph import TRANSPOSES, VIEWS, calls, tensor


def overloads_of(name: str, *variants: str) -> tuple[Any, ...]:
    """Overloads of an op that is defined when PT2E is first imported; none before."""
    packet = getattr(torch.ops.quantized_decomposed, name, None)
    found = (getattr(packet, variant, None) for variant in variants)
    return tuple(one for one in found if one is not None)


def dequantises(node: Any) -> bool:
    """Whether a node makes float32 of integers with one scale and one zero point."""
    if not calls(node, *overloads_of("dequantize_per_tensor", "default", "tensor")):
        return False
    made, held = tensor(node), tensor(node.args[0])
    return (
        made is not None
        and made.dtype == torch.float32
        and held is not None
        and held.dtype in (torch.uint8, torch.int8)
    )


def quantises(node: Any) -> bool:
    """Whether a node makes 8-bit integers of float32 with one scale and one zero point."""
    if not calls(node, *overloads_of("quantize_per_tensor", "default", "tensor")):
        return False
    made, held = tensor(node), tensor(node.args[0])
    return (
        made is not None
        and made.dtype in (torch.uint8, torch.int8)
        and held is not None
        and held.dtype == torch.float32
    )


def source_of(node: Any) -> Node | None:
    """What made float32 of integers, where nothing but views lies between."""
    while calls(node, *VIEWS, *TRANSPOSES):
        node = node.args[0]
    return node if dequantises(node) else None


def rounds_or_widens(node: Node) -> bool:
    """Whether a node is one of these ops."""
    return getattr(node.target, "namespace", "") == "quantized_decomposed"
