"""Layer norms and RMS norms over the last dimensions.

What is looked for by pattern is the core, ``x`` brought to mean 0 or to length 1. Weight and bias,
and casts to float32 around, are read from there on: in each order that people write them in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from fuseboard.contracts import Composite
from fuseboard.fuse.composites.definition import (
    TRACED,
    Reader,
    Way,
    calls,
    composite,
    is_row,
    meta,
    of_items,
)
from fuseboard.fuse.patterns.pattern import PatternMatch
from fuseboard.fuse.patterns.rewriting import Patterns
from fuseboard.torch_api.pattern_traces import arguments

aten = torch.ops.aten

_EXAMPLES = (torch.empty(2, 8), 1e-5)


# --- ops ------------------------------------------------------------------------------------------


def _layer_norm(node: Node) -> Composite | None:
    x, shape, weight, bias, eps = (value for _, value in arguments(node))
    given = {"x": x, "weight": weight, "bias": bias, "eps": eps, "dims": len(shape)}
    return of_items("layer_norm", node, given, ("y", "mean", "rstd"))


def _layer_norm_backward(node: Node) -> Composite | None:
    grad, x, shape, mean, rstd, weight, bias, _ = (value for _, value in arguments(node))
    given = {"grad": grad, "x": x, "mean": mean, "rstd": rstd, "weight": weight, "bias": bias}
    results = ("grad_x", "grad_weight", "grad_bias")
    return of_items("layer_norm_backward", node, {**given, "dims": len(shape)}, results)


def _rms_norm(node: Node) -> Composite | None:
    x, shape, weight, eps = (value for _, value in arguments(node))
    # Without one it is the epsilon of the dtype that is computed in.
    wide = meta(x).dtype if meta(x).dtype == torch.float64 else torch.float32
    eps = torch.finfo(wide).eps if eps is None else eps
    given = {"x": x, "weight": weight, "eps": eps, "dims": len(shape)}
    return of_items("rms_norm", node, given, ("y", "rstd"))


def _rms_norm_backward(node: Node) -> Composite | None:
    grad, x, shape, rstd, weight, _ = (value for _, value in arguments(node))
    given = {"grad": grad, "x": x, "rstd": rstd, "weight": weight, "dims": len(shape)}
    return of_items("rms_norm_backward", node, given, ("grad_x", "grad_weight"))


def _readers() -> Iterator[tuple[Any, Reader]]:
    yield aten.native_layer_norm.default, _layer_norm
    yield aten.native_layer_norm_backward.default, _layer_norm_backward
    if hasattr(aten, "_fused_rms_norm"):
        yield aten._fused_rms_norm.default, _rms_norm
        yield aten._fused_rms_norm_backward.default, _rms_norm_backward


READERS: dict[Any, Reader] = dict(_readers())


# --- written out ----------------------------------------------------------------------------------


def _with_weights(way: Way, match: PatternMatch) -> Composite | None:
    """A core with the weight, the bias and the casts that follow it."""
    results = dict(zip(way.results, match.results, strict=True))
    x, nodes = match.arguments["x"], set(match.nodes)
    if not meta(x).is_floating_point() or not meta(x).dim():
        return None  # the mean of the squares of complex numbers isn't that of their lengths
    weight = bias = None
    source = _cast_from(x)
    while len(results["y"].users) == 1:
        (reader,) = results["y"].users
        row = _row_beside(results["y"], reader)
        if source is not None and _is_cast(reader) and meta(reader).dtype == meta(source).dtype:
            nodes |= {x} if nodes.issuperset(x.users) else set()
            x, source = source, None
        elif calls(reader, aten.mul.Tensor) and row and weight is bias is None:
            weight = row
        elif calls(reader, aten.add.Tensor) and row and bias is None and _has_bias(way):
            bias = row
        else:
            break
        nodes.add(reader)
        results["y"] = reader
    given = {"x": x, "weight": weight, "eps": match.arguments["eps"], "dims": 1}
    given |= {"bias": bias} if _has_bias(way) else {}
    return composite(way.composite, way.form, nodes, given, results)


def _has_bias(way: Way) -> bool:
    return way.composite == "layer_norm"


def _is_cast(node: Any) -> bool:
    """Whether a node changes nothing but the dtype."""
    if not calls(node, aten._to_copy.default):
        return calls(node, torch.ops.prims.convert_element_type.default)
    source = meta(node.args[0])
    return bool(source.device == meta(node).device and source.stride() == meta(node).stride())


def _cast_from(x: Any) -> Node | None:
    """What was cast to float32, from fewer bits; None where nothing was."""
    if not _is_cast(x) or meta(x).dtype != torch.float32:
        return None
    source: Node = x.args[0]
    return source if meta(source).dtype in (torch.half, torch.bfloat16) else None


def _row_beside(y: Node, reader: Node) -> Any:
    """What a sum or product of ``y`` has for each element of the last dimension."""
    if len(reader.args) != 2 or reader.kwargs:
        return None
    other = reader.args[1] if reader.args[0] is y else reader.args[0]
    return other if is_row(other, y) else None


def _cores() -> Iterator[Way]:
    """Layer norms come first: within one there is an RMS norm of what is centred.

    So do the rarest of the results: a pattern is looked for from its first.
    """

    def way(name: str, form: str, search: Any, *results: str) -> Way:
        return Way(name, form, search, _EXAMPLES, results, widened=_with_weights)

    for how, moments in _MOMENTS.items():

        def centred_by_rsqrt(x: Any, eps: float, moments: Any = moments) -> Any:
            mean, centred, variance = moments(x)
            rstd = torch.rsqrt(variance + eps)
            return rstd, mean, centred * rstd

        def centred_by_sqrt(x: Any, eps: float, moments: Any = moments) -> Any:
            mean, centred, variance = moments(x)
            std = torch.sqrt(variance + eps)
            return std, mean, centred / std

        yield way("layer_norm", f"{how}, rsqrt", centred_by_rsqrt, "rstd", "mean", "y")
        yield way("layer_norm", f"{how}, sqrt", centred_by_sqrt, "std", "mean", "y")
    for how, square in _SQUARES.items():

        def by_rsqrt(x: Any, eps: float, square: Any = square) -> Any:
            rstd = torch.rsqrt(square(x).mean(-1, keepdim=True) + eps)
            return rstd, x * rstd

        def by_sqrt(x: Any, eps: float, square: Any = square) -> Any:
            std = torch.sqrt(square(x).mean(-1, keepdim=True) + eps)
            return std, x / std

        yield way("rms_norm", f"{how}, rsqrt", by_rsqrt, "rstd", "y")
        yield way("rms_norm", f"{how}, sqrt", by_sqrt, "std", "y")
    # As torch's own rms_norm is decomposed.
    yield way("rms_norm", "torch", _rms_norm_of_torch, "rstd", "y")


def _rms_norm_of_torch(x: Any, eps: float) -> Any:
    rstd = torch.rsqrt(aten.add.Scalar(x.pow(2).mean(-1, keepdim=True), eps))
    return rstd, x * rstd


_SQUARES = {"pow": lambda x: x.pow(2), "product": lambda x: x * x}


def _mean_of_squares(square: Any, twice: bool) -> Any:
    def moments(x: Any) -> Any:
        mean = x.mean(-1, keepdim=True)
        centred = x - mean
        variance = square(x - mean if twice else centred).mean(-1, keepdim=True)
        return mean, centred, variance

    return moments


def _var(x: Any) -> Any:
    mean = x.mean(-1, keepdim=True)
    return mean, x - mean, x.var(-1, keepdim=True, correction=0)


def _var_mean(x: Any) -> Any:
    variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return mean, x - mean, variance


#: How mean and variance are computed, and what lies between them and the mean.
_MOMENTS = {
    "pow": _mean_of_squares(_SQUARES["pow"], False),
    "product": _mean_of_squares(_SQUARES["product"], False),
    "pow twice": _mean_of_squares(_SQUARES["pow"], True),
    "var": _var,
    "var_mean": _var_mean,
}

WAYS = tuple(_cores())
PATTERNS = Patterns([way.as_pattern() for way in WAYS], TRACED / "norms")
