"""Where the written kernels fit: patterns of ATen nodes, and what stands in their place.

Patterns are matched by structure rather than node by node, since what may differ (an epsilon, a
residual, casts, which results are saved for the backward) matters to the kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard_triton._ir import contiguous_strides, same
from fuseboard_triton._torch_internals import size_of
from fuseboard_triton.kernels import (
    cross_entropy,
    gated,
    layer_norm,
    rms_norm,
    rotary,
    softmax,
)
from fuseboard_triton.kernels._launching import LONGEST_ROW

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Match:
    """One place where a written kernel fits.

    :ivar nodes: what it computes; those of them that others read as well stay.
    :ivar outputs: position in what the kernel returns → the node whose value that is.
    :ivar only: no generated kernel computes all of these nodes.
    """

    name: str
    kernel: Callable[..., tuple[Any, ...]]
    args: tuple[Any, ...]
    nodes: tuple[Node, ...]
    outputs: dict[int, Node]
    only: bool = False


def matches(graph: GraphModule) -> list[Match]:
    """Places that don't overlap, in graph order; the larger pattern comes first."""
    taken: set[Node] = set()
    found = []
    for finder in FINDERS:
        for node in graph.graph.nodes:
            if node.op != "call_function" or node in taken:
                continue
            match = finder(node)
            if match is not None and not taken & set(match.nodes):
                taken |= set(match.nodes)
                found.append(match)
    return found


def put_kernels(graph: GraphModule) -> list[str]:
    """Put calls of written kernels into a graph; the names of those that fitted."""
    found = matches(graph)
    for match in found:
        _replace(graph, match)
    graph.graph.eliminate_dead_code()
    return [match.name for match in found]


def _replace(graph: GraphModule, match: Match) -> None:
    position = {node: number for number, node in enumerate(graph.graph.nodes)}
    inputs = [arg for arg in match.args if isinstance(arg, Node)]
    last = max(inputs, key=position.__getitem__)
    if last.op == "placeholder":
        last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    with graph.graph.inserting_after(last):
        call = graph.graph.call_function(match.kernel, match.args)
    call.meta["val"] = tuple(
        match.outputs[place].meta["val"] if place in match.outputs else None
        for place in range(max(match.outputs) + 1)
    )
    after = call
    for place, node in match.outputs.items():
        with graph.graph.inserting_after(after):
            after = graph.graph.call_function(_ITEM, (call, place))
        after.meta = dict(node.meta)
        node.replace_all_uses_with(after)


_ITEM = operator.getitem


# --- looking at nodes -----------------------------------------------------------------------------


def calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def meta(node: Any) -> torch.Tensor:
    return node.meta["val"]  # type: ignore[no-any-return]


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


def items(node: Node) -> dict[int, Node]:
    """The results of a node of several that are read, by position."""
    return {user.args[1]: user for user in node.users if user.target is _ITEM}  # type: ignore[misc]


def one_reader(*nodes: Node) -> bool:
    return all(len(node.users) == 1 for node in nodes)


def residual_of(x: Node) -> tuple[Any, Any] | None:
    """The operands of a sum of two tensors of its own shape and dtype."""
    if not calls(x, aten.add.Tensor) or x.kwargs or len(x.args) != 2:
        return None
    a, b = x.args
    if not (isinstance(a, Node) and isinstance(b, Node) and isinstance(meta(a), torch.Tensor)):
        return None
    if not isinstance(meta(b), torch.Tensor) or not is_plain(x, a, b):
        return None
    return (a, b) if equal_shapes(x, a) and equal_shapes(x, b) else None


# --- norms ----------------------------------------------------------------------------------------


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
    if not calls(node, getattr(aten, "_fused_rms_norm", _ABSENT).default):
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
    if not calls(node, getattr(aten, "_fused_rms_norm_backward", _ABSENT).default):
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


# --- gated activations ----------------------------------------------------------------------------


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


# --- softmax and cross entropy --------------------------------------------------------------------


def _is_last(dim: int, node: Any) -> bool:
    rank = meta(node).dim()
    return rank > 0 and dim % rank == rank - 1


def _softmax(node: Node) -> Match | None:
    if not calls(node, aten._softmax.default):
        return None
    x, dim, half_to_float = node.args
    if half_to_float or not _is_last(dim, x) or not is_plain(x, node):
        return None
    return Match("softmax", _softmax_kernel, (x,), (node,), {0: node})


def _softmax_kernel(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (softmax.softmax(x),)


def _softmax_backward(node: Node) -> Match | None:
    if not calls(node, aten._softmax_backward_data.default):
        return None
    grad, y, dim, _ = node.args
    if not _is_last(dim, y) or not is_plain(grad, y, node):
        return None
    return Match("softmax_backward", _softmax_grad, (grad, y), (node,), {0: node})


def _softmax_grad(grad: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (softmax.softmax_backward(grad, y),)


def _cross_entropy(node: Node) -> Match | None:
    """Log-softmax, then the loss of class numbers."""
    if not calls(node, aten.nll_loss_forward.default):
        return None
    logs, target, weight, reduction, ignored = node.args
    if not calls(logs, aten._log_softmax.default) or weight is not None or reduction == 0:
        return None
    x, dim, half_to_float = logs.args
    if half_to_float or not _is_last(dim, x) or meta(x).dim() != 2 or not is_plain(x, logs):
        return None
    if meta(target).dtype != torch.int64 or not is_contiguous(meta(target)):
        return None
    found = items(node)
    write = len(logs.users) > 1
    args = (x, target, ignored, reduction == 1, write)
    outputs = {**found, 2: logs} if write else found
    nodes = (logs, node, *found.values())
    return Match("cross_entropy", cross_entropy.cross_entropy, args, nodes, outputs, only=True)


def _cross_entropy_backward(node: Node) -> Match | None:
    if not calls(node, aten._log_softmax_backward_data.default):
        return None
    inner, logs, dim, _ = node.args
    if not calls(inner, aten.nll_loss_backward.default) or not one_reader(inner):
        return None
    grad, picked, target, weight, reduction, ignored, total = inner.args
    if weight is not None or reduction == 0 or not _is_last(dim, logs) or meta(logs).dim() != 2:
        return None
    if _undetached(picked) is not _undetached(logs) or not is_plain(logs, node):
        return None
    if meta(target).dtype != torch.int64 or not is_contiguous(meta(target)):
        return None
    args = (grad, logs, target, ignored, reduction == 1, total)
    return Match("cross_entropy_backward", _loss_grad, args, (inner, node), {0: node}, only=True)


def _undetached(node: Any) -> Any:
    while calls(node, aten.detach.default, aten.alias.default):
        node = node.args[0]
    return node


def _loss_grad(*args: Any) -> tuple[torch.Tensor, ...]:
    return (cross_entropy.cross_entropy_backward(*args),)


# --- rotary embedding -----------------------------------------------------------------------------


def _rotary(node: Node) -> Match | None:
    """``x * cos + cat([-x2, x1]) * sin``, and its gradient ``g * cos + cat([gs2, -gs1])``."""
    if not calls(node, aten.add.Tensor) or node.kwargs or len(node.args) != 2:
        return None
    for plain, crossed in (node.args, node.args[::-1]):
        if not calls(plain, aten.mul.Tensor):
            continue
        match = _rotation(node, plain, crossed) or _rotation_back(node, plain, crossed)
        if match is not None:
            return match
    return None


def _rotation(node: Node, plain: Node, crossed: Any) -> Match | None:
    if not calls(crossed, aten.mul.Tensor) or not one_reader(plain, crossed):
        return None
    for joined, sin in (crossed.args, crossed.args[::-1]):
        parts = _joined(joined)
        if parts is None or not calls(parts[0], aten.neg.default):
            continue
        second, first = _half(parts[0].args[0]), _half(parts[1])
        if first is None or second is None or first[0] is not second[0]:
            continue
        x = first[0]
        if (first[1], second[1]) == (0, 1) and x in plain.args and one_reader(joined):
            cos = next((arg for arg in plain.args if arg is not x), x)
            nodes = (plain, crossed, joined, parts[0], node)
            return _rotary_match(node, x, cos, sin, _rotary_kernel, "rotary", nodes)
    return None


def _rotation_back(node: Node, plain: Node, joined: Any) -> Match | None:
    parts = _joined(joined)
    if parts is None or not calls(parts[1], aten.neg.default) or not one_reader(joined, plain):
        return None
    second, first = _half(parts[0]), _half(parts[1].args[0])
    if first is None or second is None or first[0] is not second[0]:
        return None
    product = first[0]
    if (first[1], second[1]) != (0, 1) or not calls(product, aten.mul.Tensor):
        return None
    for grad, sin in (product.args, product.args[::-1]):
        if grad in plain.args and len(product.users) <= 2:
            cos = next((arg for arg in plain.args if arg is not grad), grad)
            nodes = (plain, joined, parts[1], product, node)
            match = _rotary_match(node, grad, cos, sin, _rotary_grad, "rotary_backward", nodes)
            if match is not None:
                return match
    return None


def _joined(node: Any) -> tuple[Any, Any] | None:
    """The two tensors that are joined along the last dimension."""
    if not calls(node, aten.cat.default):
        return None
    tensors, dim = (*node.args, 0)[:2]
    if len(tensors) != 2 or not _is_last(dim, node):
        return None
    return tensors[0], tensors[1]


def _half(node: Any) -> tuple[Node, int] | None:
    """What a node is the first (0) or second (1) half of, along the last dimension."""
    if calls(node, _ITEM):
        split, number = node.args
        if calls(split, aten.split.Tensor) and len(split.meta["val"]) == 2:
            source, size, dim = (*split.args, 0)[:3]
            if _is_last(dim, source) and same(2 * size, size_of(meta(source).shape[-1])):
                return source, number
        return None
    if not calls(node, aten.slice.Tensor):
        return None
    if len(node.args) != 4:
        return None  # a step, or to the end of an unnamed dimension
    source, dim, start, end = node.args
    width = size_of(meta(source).shape[-1])
    if not _is_last(dim, source) or not isinstance(width, int) or width % 2:
        return None
    bounds = (start or 0, min(end, width) if isinstance(end, int) else end)
    return {(0, width // 2): (source, 0), (width // 2, width): (source, 1)}.get(bounds)


def _rotary_match(
    node: Node, x: Any, cos: Any, sin: Any, kernel: Any, name: str, nodes: tuple[Node, ...]
) -> Match | None:
    tensors = [x, cos, sin]
    if not all(isinstance(t, Node) and isinstance(meta(t), torch.Tensor) for t in tensors):
        return None
    if any(meta(t).dtype not in FLOATS for t in tensors) or not 1 <= meta(x).dim() <= 4:
        return None
    if not equal_shapes(node, x) or not all(_reaches(t, x) for t in (cos, sin)):
        return None
    width = width_of(x)
    if not width or width % 2 or width > 1024:
        return None
    strides = None
    if not is_contiguous(meta(node)):
        strides = [size_of(stride) for stride in meta(node).stride()]
        if not all(isinstance(stride, int) for stride in strides):
            return None
    return Match(name, kernel, (x, cos, sin, strides), nodes, {0: node}, only=True)


def _reaches(table: Any, x: Any) -> bool:
    """Whether a table broadcasts to ``x`` without making it larger, and has all of its columns."""
    small, large = meta(table).shape, meta(x).shape
    if not 1 <= len(small) <= len(large):
        return False
    pairs = list(zip(reversed(small), reversed(large), strict=False))
    sizes = [(size_of(m), size_of(n)) for m, n in pairs]
    return same(*sizes[0]) and all(same(m, 1) or same(m, n) for m, n in sizes)


def _rotary_kernel(*args: Any) -> tuple[torch.Tensor, ...]:
    return (rotary.rotary(*args),)


def _rotary_grad(*args: Any) -> tuple[torch.Tensor, ...]:
    return (rotary.rotary_backward(*args),)


class _ABSENT:
    """Stands for an op that this torch doesn't have."""

    default = None


def _finders() -> Iterator[Callable[[Node], Match | None]]:
    yield from (_cross_entropy, _cross_entropy_backward, _rotary)
    yield from (_fused_rms_norm, _written_out_rms_norm, _rms_norm_backward)
    yield from (_layer_norm, _layer_norm_backward, _gated_backward, _gated)
    yield from (_softmax, _softmax_backward)


FINDERS = tuple(_finders())
