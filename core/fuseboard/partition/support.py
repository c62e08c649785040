"""What the board declines on a backend's behalf: what it hasn't declared that it can have."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch.fx import Node

from fuseboard.contracts import BackendInfo
from fuseboard.partition.claims import first_reason
from fuseboard.torch_api import symbols as torch_symbols


class Support:
    """What each backend can't have of the same nodes; their values are looked at once for all.

    A node has *traits*, each a bit: the device types and dtypes of the values that it reads and
    makes, and whether they have symbolic sizes. Where a backend supports all traits of a node,
    nothing speaks against it; else :func:`why_unsupported` says what does.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._bits: dict[Hashable, int] = {}
        self._own: dict[Node, int] = {}
        self._plain: dict[tuple[torch.dtype, torch.device], int] = {}
        self._traits = {node: self._of(node) for node in nodes}

    def refusals(self, info: BackendInfo) -> dict[str, str]:
        """The names of the nodes that a backend can't have, each with the reason."""
        unsupported = sum(bit for trait, bit in self._bits.items() if not _supports(info, trait))
        refused: dict[str, str] = {}
        for node, traits in self._traits.items():
            if traits & unsupported:
                reason = why_unsupported(info, node)
                if reason is not None:
                    refused[node.name] = reason
        return refused

    def _of(self, node: Node) -> int:
        """The traits of a node and of what it reads."""
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._bit("holds graphs")
        traits = self._of_value(node)
        for used in node.all_input_nodes:
            known = self._own.get(used)
            traits |= self._of_value(used) if known is None else known
        return traits

    def _of_value(self, node: Node) -> int:
        value = node.meta.get("val")
        traits = 0
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                traits |= self._of_kind(item.dtype, item.device)
        if torch_symbols.symbolic_numbers(value):
            traits |= self._bit("symbolic")
        self._own[node] = traits
        return traits

    def _of_kind(self, dtype: torch.dtype, device: torch.device) -> int:
        known = self._plain.get((dtype, device))
        if known is None:
            known = self._bit(device.type)
            if dtype.is_floating_point or dtype.is_complex:
                known |= self._bit(dtype)
            self._plain[dtype, device] = known
        return known

    def _bit(self, trait: Hashable) -> int:
        return self._bits.setdefault(trait, 1 << len(self._bits))


def _supports(info: BackendInfo, trait: Hashable) -> bool:
    """Whether a trait alone is no reason to look closer."""
    if isinstance(trait, torch.dtype):
        return info.dtypes is None or trait in info.dtypes
    if trait == "symbolic":
        return info.dynamic_shapes
    return trait in info.device_types


def why_unsupported(info: BackendInfo, node: Node) -> str | None:
    """What the board declines on a backend's behalf.

    Its device types, dtypes, dynamic shapes, and what would be wrong on any backend but eager.
    """
    reason = _why_special(info, node)
    if reason is not None:
        return reason
    reason = first_reason(node, lambda inner: _why_values(info, inner))
    if reason is None and not info.dynamic_shapes:
        reason = first_reason(node, lambda inner: _why_symbolic(info, inner))
    return reason


def _why_special(info: BackendInfo, node: Node) -> str | None:
    """Ops that stay in eager because of what they do, not of what they compute on."""
    if info.name == "eager":
        return None
    if node.target is torch.ops.higher_order.with_effects:
        # A compiled region that fails is run again in eager, and the effect would happen twice.
        # Inductor also returns None for the token, which is an output of the region.
        return "it has effects beyond its results, and runs once, in order, in eager"
    return None


def _why_values(info: BackendInfo, node: Node) -> str | None:
    values = [used.meta.get("val") for used in node.all_input_nodes]
    own = node.meta.get("val")
    values.extend(own if isinstance(own, list | tuple) else [own])
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device.type not in info.device_types:
                allowed = ", ".join(sorted(info.device_types))
                return f"device {value.device.type}; {info.name} runs on {allowed}"
            if (
                info.dtypes is not None
                and (value.is_floating_point() or value.is_complex())
                and value.dtype not in info.dtypes
            ):
                return f"dtype {value.dtype} isn't supported by {info.name}"
    return None


def _why_symbolic(info: BackendInfo, node: Node) -> str | None:
    """Why a backend without dynamic shapes can't have a node."""
    for value in (node.meta.get("val"), *(used.meta.get("val") for used in node.all_input_nodes)):
        numbers = torch_symbols.symbolic_numbers(value)
        if any(torch_symbols.expression(number).free_symbols for number in numbers):
            return f"symbolic sizes; {info.name} has no dynamic shapes"
    return None
