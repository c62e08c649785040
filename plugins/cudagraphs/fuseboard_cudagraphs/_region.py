"""Whether a region can be recorded as a whole, and what its inputs are."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fuseboard import Region
from fuseboard_cudagraphs._memory import is_dense
from fuseboard_cudagraphs._options import Options
from fuseboard_cudagraphs._partition import is_cpu_scalar, tensors_of, why_not


def is_wanted(region: Region, options: Options) -> bool:
    """Whether regions of its backend are to be recorded."""
    return options.inner is None or region.backend in options.inner


def why_not_region(region: Region, options: Options, device_type: str = "cuda") -> str | None:
    """Why a region isn't recorded, for the report; None if it is."""
    if not is_wanted(region, options):
        return f"{region.backend} isn't among plugins.cudagraphs.inner"
    nodes = list(region.graph.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    for node in inputs:
        for value in tensors_of(node):
            if value.device.type != device_type and not is_cpu_scalar(value):
                return f"input {node.name} is on {value.device}"
    devices = {
        value.device for node in nodes for value in tensors_of(node) if not is_cpu_scalar(value)
    }
    if not devices:
        return f"nothing of it is on a {device_type} device"
    if len(devices) > 1:
        return f"it spans {', '.join(sorted(map(str, devices)))}"
    return _why_not_ops(nodes, options, device_type)


def _why_not_ops(nodes: Sequence[Node], options: Options, device_type: str) -> str | None:
    calls = [node for node in nodes if node.op == "call_function"]
    declined = []
    for node in calls:
        reason = why_not(node, device_type, options.namespaces)
        if reason is not None and node.target is not operator.getitem:
            declined.append(f"{node.target}: {reason}")
    if declined:
        more = f" (and {len(declined) - 1} more)" if len(declined) > 1 else ""
        return f"{declined[0]}{more}"
    count = sum(map(computes, calls))
    if count < options.min_nodes:
        return f"too small: {count} ops that compute, plugins.cudagraphs.min_nodes is " + str(
            options.min_nodes
        )
    return None


def computes(node: Node) -> bool:
    """Whether an op launches a kernel, as views and arithmetic on sizes don't."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and not target.is_view


@dataclass(frozen=True)
class Inputs:
    """What a region's inputs are, by position.

    :ivar tensors: those on the device.
    :ivar static: those among ``tensors`` that are parameters, buffers, or computed from them.
    :ivar scalars: numbers in tensors on the CPU.
    :ivar numbers: sizes and other Python numbers.
    :ivar shaped: those among ``tensors`` whose layout can differ from call to call, or must be
        known exactly because it isn't dense.
    """

    tensors: tuple[int, ...]
    static: frozenset[int]
    scalars: tuple[int, ...]
    numbers: tuple[int, ...]
    shaped: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, region: Region, device_type: str = "cuda") -> Inputs:
        """Read off the placeholders' fake values."""
        values = [node.meta.get("val") for node in region.graph.graph.find_nodes(op="placeholder")]
        held = [isinstance(value, torch.Tensor) for value in values]
        tensors = tuple(i for i, v in enumerate(values) if held[i] and v.device.type == device_type)
        every = [v for node in region.graph.graph.nodes for v in tensors_of(node)]
        return cls(
            tensors=tensors,
            static=frozenset(region.static_inputs) & frozenset(tensors),
            scalars=tuple(i for i in range(len(values)) if held[i] and i not in tensors),
            numbers=tuple(i for i in range(len(values)) if not held[i]),
            shaped=tuple(i for i in tensors if _varies(values[i]) or not is_dense(values[i])),
            device=next(v.device for v in every if v.device.type == device_type),
        )

    def key(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """What a recording holds for: sizes, layouts, and the numbers on the host.

        Numbers are compared as text: NaN equals itself then, and -0.0 isn't 0.0.
        """
        if not (self.numbers or self.scalars or self.shaped):
            return ()
        return (
            tuple(_number(inputs[i]) for i in self.numbers),
            tuple(repr(inputs[i].item()) for i in self.scalars),
            tuple((inputs[i].shape, inputs[i].stride()) for i in self.shaped),
        )

    def strays(self, inputs: Sequence[Any]) -> list[int]:
        """Positions of tensors that a call gives on another device than was planned."""
        return [i for i in self.tensors if inputs[i].device != self.device]


def _number(value: Any) -> Any:
    return value if type(value) is int else repr(value)


def _varies(value: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
