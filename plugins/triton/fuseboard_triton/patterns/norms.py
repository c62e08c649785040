"""Layer norms and RMS norms, with a residual or without; also RMS norms that are written out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fuseboard
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


def _written_out(wide: bool, weighted: bool, add: Any) -> fuseboard.Pattern:
    """``x * rsqrt(mean(x**2) + eps) * weight`` in single ops.

    :param wide: cast to float32 between.
    :param add: the op that adds eps; torch's own composite has another one.
    """

    def search(x: Any, eps: float, weight: Any = None) -> tuple[Any, ...]:
        cast = x.to(torch.float32) if wide else x
        rstd = torch.rsqrt(add(cast.pow(2).mean(-1, keepdim=True), eps))
        y = (cast * rstd).to(x.dtype)
        y = y if weight is None else y * weight
        return (rstd, y, cast) if wide else (rstd, y)  # which others may read

    x = torch.empty(2, 8, dtype=torch.half if wide else torch.float32)
    examples = [x, 1e-5, x[0]] if weighted else [x, 1e-5]
    parts = ["rms_norm", "wide" * wide, "weighted" * weighted, add._overloadname]
    name = " ".join(filter(None, parts))
    return fuseboard.Pattern(name, search, examples, check=_fits, training=False)


def _fits(match: fuseboard.PatternMatch) -> bool:
    rstd, y = match.results[:2]
    x, weight = match.arguments["x"], match.arguments.get("weight")
    if not width_of(x) or not is_plain(x, y, weight) or meta(rstd).dtype != torch.float32:
        return False
    sizes = None if weight is None else meta(weight).shape
    return sizes is None or (len(sizes) == 1 and same(size_of(sizes[0]), width_of(x)))


PATTERNS = fuseboard.Patterns(
    [
        _written_out(wide, weighted, add)
        for weighted in (True, False)
        for wide in (True, False)
        for add in (aten.add.Tensor, aten.add.Scalar)
    ],
    Path(__file__).with_name("traced_norms"),
)


def find(graph: GraphModule) -> Iterator[Match]:
    """RMS norms that are written out."""
    for match in PATTERNS.find(graph, "inference", {}):
        rstd, y, *cast = match.results
        nodes = [node for node in match.nodes if node not in cast]
        read = rstd if set(rstd.users) - set(nodes) else None
        x, eps, *weight = match.arguments.values()
        yield _rms_outputs(x, y, read, weight[0] if weight else None, eps, nodes)


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
    _rms_norm_backward,
    _layer_norm,
    _layer_norm_backward,
)
