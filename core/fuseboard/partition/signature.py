"""A region's canonical hash: regions with equal ones are lowered once."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.nodes import target_name


def signature(
    graph: GraphModule, backend: str, further: Sequence[Any], *, any_index: bool = False
) -> str:
    """A canonical hash: equal for regions that the same lowered code can serve.

    It holds wiring, constants, and the metadata of every value; not names, not weights.

    :param any_index: make it equal also for graphs that are on other devices of a kind, as those
        of ranks on one host are; no code that was compiled for one serves these.
    """
    indices: dict[torch.device, int] = {}

    def device_text(device: torch.device) -> str:
        number = indices.setdefault(device, len(indices))
        return f"{device.type} {number}" if any_index else f"{device}"

    numbers: dict[Node, int] = {}
    parts: list[str] = [backend, *map(str, further)]

    def text(value: Any) -> str:
        if isinstance(value, Node):
            return f"%{numbers[value]}"
        if isinstance(value, list | tuple):
            return f"{type(value).__name__}({','.join(map(text, value))})"
        if isinstance(value, dict):
            return f"dict({','.join(f'{key}={text(item)}' for key, item in value.items())})"
        if any_index and isinstance(value, torch.device):
            return device_text(value)
        return f"{type(value).__name__}:{value!r}"

    for node in graph.graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "get_attr":
            held = operator.attrgetter(str(node.target))(graph)
            if isinstance(held, GraphModule):
                target = signature(held, "", (), any_index=any_index)
            else:
                target = _attribute_text(held, device_text)
        elif node.op == "placeholder":
            target = ""
        else:
            target = target_name(node) if node.op == "call_function" else str(node.target)
        arguments = "" if node.op == "placeholder" else text(node.args) + text(node.kwargs)
        value = _value_text(node.meta.get("val"), device_text)
        parts.append(f"{node.op} {target} {arguments} -> {value}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _value_text(value: Any, device_text: Callable[[torch.device], str]) -> str:
    if isinstance(value, list | tuple):
        return f"({','.join(_value_text(item, device_text) for item in value)})"
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout == torch.strided else value.layout
        offset = value.storage_offset() if value.layout == torch.strided else 0
        return f"{value.dtype} {device_text(value.device)} {tuple(value.shape)} {strides} {offset}"
    return repr(value)


def _attribute_text(value: Any, device_text: Callable[[torch.device], str]) -> str:
    if isinstance(value, torch.Tensor):
        with torch_internals.real_tensors():
            plain = value.detach().cpu().resolve_conj().resolve_neg()
            # A dense tensor may have any strides where its size is 1; view() wants 1 in the last.
            dense = plain.clone(memory_format=torch.contiguous_format)
            data = dense.flatten().view(torch.uint8).numpy().tobytes()
        return f"{_value_text(value, device_text)} {hashlib.sha256(data).hexdigest()}"
    return repr(value)
