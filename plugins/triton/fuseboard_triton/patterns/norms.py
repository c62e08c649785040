"""Layer norms and RMS norms, with a residual or without; also RMS norms that are written out."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fuseboard_triton._ir import same
from fuseboard_triton._torch_internals import size_of
from fuseboard_triton.kernels import layer_norm, rms_norm
from fuseboard_triton.patterns.nodes import (
    ABSENT,
    Match,
    calls,
    is_plain,
    items,
    meta,
    one_reader,
    residual_of,
    width_of,
)

aten = torch.ops.aten


def _rms_outputs(x: Node, y: Node, rstd: Node | None, weight: Any, eps: float, nodes: Any) -> Match:
    residual = residual_of(x)
    outputs = {0: y}
    if rstd is not None:
        outputs[1] = rstd
    if residual is None:
        return Match("rms_norm", rms_norm.rms_norm, (x, weight, eps), tuple(nodes), outputs)
    outputs[2] = x
    args = (*residual, weight, eps)
    return Match("add+rms_norm", rms_norm.add_rms_norm, args, (*nodes, x), outputs)


def _fused_rms_norm(node: Node) -> Match | None:
    """torch's own op, which CUDA graphs hold whole."""
    if not calls(node, getattr(aten, "_fused_rms_norm", ABSENT).default):
        return None
    x, normalised, weight, eps = (*node.args, None, None)[:4]
    found = items(node)
    if len(normalised) != 1 or not width_of(x) or not is_plain(x, weight) or 0 not in found:
        return None
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return _rms_outputs(x, found[0], found.get(1), weight, eps, (node, *found.values()))


def _written_out_rms_norm(node: Node) -> Match | None:
    """``x * rsqrt(mean(x**2) + eps) * weight`` in single ops, cast to float32 between or not."""
    if not calls(node, aten.rsqrt.default):
        return None
    added = node.args[0]
    if not calls(added, aten.add.Tensor, aten.add.Scalar) or added.kwargs:
        return None
    mean, eps = added.args
    if not isinstance(eps, float) or not calls(mean, aten.mean.dim):
        return None
    squares, dims, *rest = mean.args
    if not calls(squares, aten.pow.Tensor_Scalar) or squares.args[1] != 2 or rest != [True]:
        return None
    wide = squares.args[0]
    rank = meta(wide).dim()
    if [dim % rank for dim in dims] != [rank - 1] or not one_reader(squares, mean, added):
        return None
    x = _uncast(wide)
    scaled = [
        user
        for user in node.users
        if calls(user, aten.mul.Tensor) and any(_uncast(arg) is x for arg in user.args)
    ]
    if len(scaled) != 1 or not one_reader(scaled[0]) or not width_of(x):
        return None
    y, nodes = scaled[0], [squares, mean, added, node, scaled[0]]
    if meta(y).dtype != meta(x).dtype:
        (y,) = y.users
        if not calls(y, aten._to_copy.default):
            return None
        nodes.append(y)
    weight = _weight_of(y)
    if weight is not None:
        (y,) = y.users
        nodes.append(y)
    rstd = node if len(node.users) > 1 else None
    if not is_plain(x, y, weight) or meta(node).dtype != torch.float32:
        return None
    return _rms_outputs(x, y, rstd, weight, eps, nodes)


def _uncast(node: Any) -> Any:
    """What a cast to float32 is of."""
    return node.args[0] if calls(node, aten._to_copy.default) else node


def _weight_of(node: Node) -> Node | None:
    """The vector that a value's only reader multiplies it with."""
    if not one_reader(node):
        return None
    (user,) = node.users
    if not calls(user, aten.mul.Tensor):
        return None
    weight = next((arg for arg in user.args if arg is not node), None)
    if not isinstance(weight, Node) or not isinstance(meta(weight), torch.Tensor):
        return None
    fits = meta(weight).dim() == 1 and same(size_of(meta(weight).shape[0]), width_of(node))
    return weight if fits and meta(user).dtype == meta(node).dtype else None


def _rms_norm_backward(node: Node) -> Match | None:
    if not calls(node, getattr(aten, "_fused_rms_norm_backward", ABSENT).default):
        return None
    grad, x, normalised, rstd, weight, _ = node.args
    if len(normalised) != 1 or not width_of(x) or not is_plain(grad, x, weight):
        return None
    found = items(node)
    args = (grad, x, weight, rstd)
    nodes = (node, *found.values())
    return Match("rms_norm_backward", rms_norm.rms_norm_backward, args, nodes, found)


def _layer_norm(node: Node) -> Match | None:
    if not calls(node, aten.native_layer_norm.default):
        return None
    x, normalised, weight, bias, eps = node.args
    found = items(node)
    if len(normalised) != 1 or not width_of(x) or not is_plain(x, weight, bias) or 0 not in found:
        return None
    stats = node.meta["val"][1].dtype
    nodes = (node, *found.values())
    residual = residual_of(x)
    if residual is None:
        args = (x, weight, bias, eps, stats)
        return Match("layer_norm", layer_norm.layer_norm, args, nodes, found)
    args = (*residual, weight, bias, eps, stats)
    outputs = {**found, 3: x}
    return Match("add+layer_norm", layer_norm.add_layer_norm, args, (*nodes, x), outputs)


def _layer_norm_backward(node: Node) -> Match | None:
    if not calls(node, aten.native_layer_norm_backward.default):
        return None
    grad, x, normalised, mean, rstd, weight, bias, _ = node.args
    if len(normalised) != 1 or not width_of(x) or not is_plain(grad, x, weight, bias):
        return None
    found = items(node)
    args = (grad, x, weight, mean, rstd)
    nodes = (node, *found.values())
    return Match("layer_norm_backward", layer_norm.layer_norm_backward, args, nodes, found)


FINDERS = (
    _fused_rms_norm,
    _written_out_rms_norm,
    _rms_norm_backward,
    _layer_norm,
    _layer_norm_backward,
)
