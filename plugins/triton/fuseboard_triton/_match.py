"""Where the written kernels fit, and their calls in the place of what they compute.

Norms, rotary embeddings and cross entropy are the board's composites. What is said
here is which of them the kernels take: rows of so many elements, dtypes, layouts. A norm's kernel
adds the residual as well, where what is normalised is a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

import fuseboard
from fuseboard_triton._ir import contiguous_strides, same
from fuseboard_triton._torch_internals import size_of
from fuseboard_triton.kernels import cross_entropy, norms, rotary
from fuseboard_triton.kernels._launching import LONGEST_ROW

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Match(NamedTuple):
    """One place where a written kernel fits.

    :ivar found: what the kernel computes.
    :ivar outputs: position in what the kernel returns → the node whose value that is; None for a
        kernel of one result.
    :ivar only: no generated kernel computes all of these nodes.
    """

    name: str
    found: fuseboard.Composite
    kernel: Callable[..., Any]
    args: tuple[Any, ...]
    outputs: dict[int, Node] | None = None
    only: bool = False


def matches(graph: GraphModule) -> list[Match]:
    """Places that don't overlap."""
    fitting: list[Match] = []
    sums: set[Node] = set()  # that a kernel adds before it normalises them

    def fits(found: fuseboard.Composite) -> bool:
        match = _KERNELS[found.name](found, sums)
        fitting.extend([] if match is None else [match])
        return match is not None

    fuseboard.find_composites(graph, _KERNELS.keys(), fits)
    return fitting


def put_kernels(graph: GraphModule) -> list[str]:
    """Put calls of written kernels into a graph; the names of those that fitted."""
    found = matches(graph)
    for match in found:
        fuseboard.replace_composite(graph, match.found, match.kernel, match.args, match.outputs)
    graph.graph.eliminate_dead_code()
    return [match.name for match in found]


# --- norms ----------------------------------------------------------------------------------------


def _norm(found: fuseboard.Composite, sums: set[Node]) -> Match | None:
    x, weight, eps, dims = (found.arguments[name] for name in ("x", "weight", "eps", "dims"))
    rows = [found.arguments["bias"]] if "bias" in found.arguments else []
    places = {"y": 0, "mean": 1, "rstd": len(rows) + 1}
    if dims != 1 or not width_of(x) or not found.results.keys() <= places.keys():
        return None
    statistics = [node for name, node in found.results.items() if name != "y"]
    if not is_plain(x, weight, *rows, found.results.get("y")):
        return None
    args = [weight, *rows, eps]
    if found.name == "layer_norm":
        dtypes = {meta(node).dtype for node in statistics} or {torch.float32}
        if len(dtypes) > 1:
            return None
        args += dtypes
    elif any(meta(node).dtype != torch.float32 for node in statistics):
        return None
    outputs = {places[name]: node for name, node in found.results.items()}
    residual = _residual_of(x, found, sums)
    plain, added = _NORMS[found.name]
    if residual is None:
        return Match(found.name, found, plain, (x, *args), outputs)
    sums.add(x)
    outputs[len(rows) + 2] = x
    return Match(f"add+{found.name}", found, added, (*residual, *args), outputs)


_NORMS = {
    "layer_norm": (norms.layer_norm, norms.add_layer_norm),
    "rms_norm": (norms.rms_norm, norms.add_rms_norm),
}


def _residual_of(x: Node, found: fuseboard.Composite, sums: set[Node]) -> tuple[Any, Any] | None:
    """The operands of a sum of two tensors of its own shape and dtype."""
    if x in sums or x.target is not torch.ops.aten.add.Tensor or x.kwargs or len(x.args) != 2:
        return None
    a, b = x.args
    if not (isinstance(a, Node) and isinstance(b, Node) and isinstance(meta(a), torch.Tensor)):
        return None
    if not isinstance(meta(b), torch.Tensor) or not is_plain(x, a, b):
        return None
    # The kernel can't give the sum before weight and bias are there.
    last = max(one for one in (*found.arguments.values(), a, b) if isinstance(one, Node))
    if any(user <= last and user not in found.nodes for user in x.users):
        return None
    return (a, b) if equal_shapes(x, a) and equal_shapes(x, b) else None


def _layer_norm_backward(found: fuseboard.Composite, sums: set[Node]) -> Match | None:
    names = ("grad", "x", "weight", "mean", "rstd")
    args = tuple(found.arguments[name] for name in names)
    if found.arguments["dims"] != 1 or not width_of(args[1]):
        return None
    if not is_plain(*args[:3], found.arguments["bias"]):
        return None
    outputs = _places(found, "grad_x", "grad_weight", "grad_bias")
    return Match(found.name, found, norms.layer_norm_backward, args, outputs)


def _rms_norm_backward(found: fuseboard.Composite, sums: set[Node]) -> Match | None:
    args = tuple(found.arguments[name] for name in ("grad", "x", "weight", "rstd"))
    if found.arguments["dims"] != 1 or not width_of(args[1]) or not is_plain(*args[:3]):
        return None
    outputs = _places(found, "grad_x", "grad_weight")
    return Match(found.name, found, norms.rms_norm_backward, args, outputs)


# --- rotary embeddings ----------------------------------------------------------------------------


def _rotary(found: fuseboard.Composite, sums: set[Node]) -> Match | None:
    x, cos, sin, interleaved = found.arguments.values()
    (result,) = found.results.values()
    tensors = [x, cos, sin]
    if interleaved or any(meta(t).dtype not in FLOATS for t in tensors):
        return None
    width = width_of(x)
    if not 1 <= meta(x).dim() <= 4 or not width or width % 2 or width > 1024:
        return None
    if not all(_reaches(t, x) for t in (cos, sin)):
        return None
    strides = None
    if not is_contiguous(meta(result)):
        strides = [size_of(stride) for stride in meta(result).stride()]
        if not all(isinstance(stride, int) for stride in strides):
            return None
    kernel = rotary.rotary if found.name == "rotary" else rotary.rotary_backward
    return Match(found.name, found, kernel, (*tensors, strides), only=True)


def _reaches(table: Any, x: Any) -> bool:
    """Whether a table has all columns of ``x``."""
    small, large = meta(table).shape, meta(x).shape
    return len(small) > 0 and same(size_of(small[-1]), size_of(large[-1]))


# --- losses ------------------------------------------------------------------------------


def _cross_entropy(found: fuseboard.Composite, sums: set[Node]) -> Match | None:
    given, logs = found.arguments, found.results.get("log_probabilities")
    if not _is_common_loss(found, given["logits"]):
        return None
    mean = given["reduction"] == "mean"
    args = (given["logits"], given["target"], given["ignore_index"], mean, logs is not None)
    outputs = _places(found, "loss", "total_weight", "log_probabilities")
    return Match(found.name, found, cross_entropy.cross_entropy, args, outputs, only=True)


def _cross_entropy_backward(found: fuseboard.Composite, sums: set[Node]) -> Match | None:
    given = found.arguments
    if not _is_common_loss(found, given["log_probabilities"]):
        return None
    first = tuple(given[name] for name in ("grad", "log_probabilities", "target", "ignore_index"))
    args = (*first, given["reduction"] == "mean", given["total_weight"])
    return Match(found.name, found, cross_entropy.cross_entropy_backward, args, only=True)


def _is_common_loss(found: fuseboard.Composite, rows: Node) -> bool:
    target = meta(found.arguments["target"])
    if found.arguments["weight"] is not None or found.arguments["reduction"] == "none":
        return False
    return is_plain(rows) and target.dtype == torch.int64 and is_contiguous(target)


_KERNELS: dict[str, Callable[[fuseboard.Composite, set[Node]], Match | None]] = {
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _cross_entropy_backward,
    "rotary": _rotary,
    "rotary_backward": _rotary,
    "rms_norm": _norm,
    "rms_norm_backward": _rms_norm_backward,
    "layer_norm": _norm,
    "layer_norm_backward": _layer_norm_backward,
}


# --- reading nodes --------------------------------------------------------------------------------


def _places(found: fuseboard.Composite, *names: str) -> dict[int, Node]:
    """The results by their places in what a kernel returns."""
    return {names.index(name): node for name, node in found.results.items()}


def meta(node: Any) -> Any:
    return node.meta["val"]


def is_plain(*nodes: Any) -> bool:
    """Whether these are contiguous floating tensors of one dtype."""
    values = [meta(node) for node in nodes if node is not None]
    if not all(isinstance(v, torch.Tensor) and v.dtype in FLOATS for v in values):
        return False
    return len({v.dtype for v in values}) == 1 and all(is_contiguous(v) for v in values)


def is_contiguous(value: torch.Tensor) -> bool:
    shape = tuple(size_of(size) for size in value.shape)
    strides = [size_of(stride) for stride in value.stride()]
    pairs = zip(shape, strides, contiguous_strides(shape), strict=True)
    return all(same(size, 1) or same(have, want) for size, have, want in pairs)


def equal_shapes(a: Any, b: Any) -> bool:
    one, other = meta(a).shape, meta(b).shape
    return len(one) == len(other) and all(
        same(size_of(m), size_of(n)) for m, n in zip(one, other, strict=True)
    )


def width_of(node: Any) -> int:
    """The static size of the last dimension; 0 where it isn't, or isn't one that kernels take."""
    shape = meta(node).shape
    width = size_of(shape[-1]) if len(shape) else 0
    return width if isinstance(width, int) and 0 < width <= LONGEST_ROW else 0
