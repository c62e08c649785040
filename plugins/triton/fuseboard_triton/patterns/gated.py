"""SwiGLU and GeGLU, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fuseboard_triton.kernels import gated
from fuseboard_triton.patterns.nodes import Match, calls, equal_shapes, is_plain, meta, one_reader

aten = torch.ops.aten


def _activation(node: Any) -> str | None:
    if calls(node, aten.silu.default, aten.silu_backward.default):
        return "silu"
    if calls(node, aten.gelu.default, aten.gelu_backward.default):
        kind = node.kwargs.get("approximate", "none")
        return "gelu_tanh" if kind == "tanh" else "gelu"
    return None


def _gated(node: Node) -> Match | None:
    """``act(gate) * up``."""
    if not calls(node, aten.mul.Tensor):
        return None
    for active, up in (node.args, node.args[::-1]):
        if not calls(active, aten.silu.default, aten.gelu.default) or not isinstance(up, Node):
            continue
        gate = active.args[0]
        fits = isinstance(meta(up), torch.Tensor) and equal_shapes(gate, up)
        if not fits or not one_reader(active) or up is active or not is_plain(node):
            continue
        if meta(gate).dtype == meta(up).dtype == meta(node).dtype and meta(node).dim():
            args = (gate, up, _activation(active))
            return Match(f"gated {args[2]}", _gated_kernel, args, (active, node), {0: node})
    return None


def _gated_kernel(*args: Any) -> tuple[torch.Tensor, ...]:
    return (gated.gated(*args),)


def _gated_backward(node: Node) -> Match | None:
    """``act_backward(grad * up, gate)`` beside ``grad * act(gate)``."""
    if not calls(node, aten.silu_backward.default, aten.gelu_backward.default):
        return None
    scaled, gate = node.args[:2]
    if not calls(scaled, aten.mul.Tensor) or not one_reader(scaled):
        return None
    for grad, up in (scaled.args, scaled.args[::-1]):
        found = _up_gradient(node, grad, gate)
        if found is None or not isinstance(up, Node) or not is_plain(grad, node, found[1]):
            continue
        same_type = meta(up).dtype == meta(gate).dtype == meta(node).dtype
        if same_type and equal_shapes(up, gate) and equal_shapes(grad, gate):
            active, other = found
            args = (grad, gate, up, _activation(node))
            name = f"gated {args[3]} backward"
            nodes = (scaled, node, active, other)
            return Match(name, gated.gated_backward, args, nodes, {0: node, 1: other})
    return None


def _up_gradient(node: Node, grad: Any, gate: Any) -> tuple[Node, Node] | None:
    """``act(gate)`` and its product with the gradient."""
    if not isinstance(grad, Node) or not isinstance(gate, Node):
        return None
    for active in gate.users:
        if calls(active, aten.silu.default, aten.gelu.default):
            if _activation(active) == _activation(node) and one_reader(active):
                (other,) = active.users
                if calls(other, aten.mul.Tensor) and grad in other.args:
                    return active, other
    return None


FINDERS = (_gated_backward, _gated)
