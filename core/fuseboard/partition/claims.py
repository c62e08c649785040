"""From what a backend supports, node by node, to claims and declines with reasons."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from fuseboard import torch_internals
from fuseboard.contracts import BackendInfo, Claim, Decline


def claim_nodes(
    graph: GraphModule,
    why_not: Callable[[Node], str | None],
    native: Callable[[Node], bool] = lambda node: True,
) -> list[Claim | Decline]:
    """Claim every node that nothing speaks against, as one stretch.

    :param why_not: the reason to decline a ``call_function`` node, or None to claim it.
    :param native: whether the backend runs a claimed node better than eager would.
    """
    claimed: list[Node] = []
    answers: list[Claim | Decline] = []
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        reason = why_not(node)
        if reason is None:
            claimed.append(node)
        else:
            answers.append(Decline(node=node.name, reason=reason))
    if claimed:
        own = frozenset(node.name for node in claimed if native(node))
        answers.insert(0, Claim(nodes=frozenset(node.name for node in claimed), native=own))
    return answers


def why_unsupported(info: BackendInfo, node: Node) -> str | None:
    """What the board declines on a backend's behalf: its device types, dtypes, dynamic shapes."""
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
            if not info.dynamic_shapes and torch_internals.free_symbols(value):
                return f"symbolic sizes; {info.name} has no dynamic shapes"
    return None
