"""A rough cost of nodes, to weigh claims against each other before anything is measured."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api import symbols as torch_symbols

#: One core of a current server CPU, float32: the ratio is what matters, not the values.
FLOPS_PER_US = 50_000.0
BYTES_PER_US = 10_000.0

_ATTENTIONS = {"attention", "attention_backward", "attention_gradients"}
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear", "mv", "addmv", "dot"}


def estimates_us(nodes: Iterable[Node]) -> dict[Node, float]:
    """Roofline estimates of one eager call of each node, in microseconds; views cost nothing.

    Each value is looked at once for all its readers.
    """
    known: dict[Node, float] = {}

    def own_bytes(node: Node) -> float:
        found = known.get(node)
        if found is None:
            found = known[node] = value_bytes(node.meta.get("val"))
        return found

    estimates: dict[Node, float] = {}
    kinds: dict[int, tuple[bool, bool]] = {}  # of ops, by identity: hashing one takes as long
    for node in nodes:
        kind = kinds.get(id(node.target))
        if kind is None:
            kind = kinds[id(node.target)] = is_view(node), is_contraction(node)
        views, contracts = kind
        if views or not _holds_tensor(node.meta.get("val")):
            estimates[node] = 0.0
            continue
        traffic = own_bytes(node) + sum(map(own_bytes, node.all_input_nodes))
        flops = _flops(node) if contracts else 0.0
        estimates[node] = max(flops / FLOPS_PER_US, traffic / BYTES_PER_US)
    return estimates


def is_free(node: Node) -> bool:
    """Whether a node does no work on data: a view, a tuple item, arithmetic on sizes."""
    return is_view(node) or not _holds_tensor(node.meta.get("val"))


def is_view(node: Node) -> bool:
    """Whether a node's results alias its input by schema (tuple items of views included)."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return bool(target.is_view)
    if getattr(target, "__name__", "") == "getitem":
        return True
    return False


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, list | tuple) and any(map(_holds_tensor, value))


def value_bytes(value: Any) -> float:
    """The bytes of a fake value's elements, of several values together."""
    if isinstance(value, torch.Tensor):
        count = value.numel() if torch_symbols.is_plain(value) else math.prod(sizes(value))
        return float(count) * value.dtype.itemsize
    if isinstance(value, list | tuple):
        return sum(map(value_bytes, value))
    return 0.0


def sizes(value: torch.Tensor) -> list[int]:
    """A fake tensor's sizes in the example that is being compiled."""
    return [size if type(size) is int else torch_internals.size_hint(size) for size in value.shape]


def is_contraction(node: Node) -> bool:
    """Whether a node is a matrix product, a convolution or attention: a kernel of its own."""
    name = getattr(node.target, "_opname", "")
    return name in _PRODUCTS or "convolution" in name or is_attention(node)


def is_attention(node: Node) -> bool:
    """Whether a node is an attention, its backward included."""
    name = getattr(node.target, "_opname", "")
    return "scaled_dot_product" in name or name in _ATTENTIONS


def is_creation(node: Node) -> bool:
    """Whether a node makes a tensor from constants and sizes alone, always the same one."""
    for used in node.all_input_nodes:
        if _holds_tensor(used.meta.get("val")):
            return False  # nearly always
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and isinstance(node.meta.get("val"), torch.Tensor)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not node.is_impure()
    )


def _flops(node: Node) -> float:
    """Floating-point operations of a contraction; 0 where its shapes don't tell."""
    name = node.target._opname  # type: ignore[union-attr]
    shapes = [
        sizes(value)
        for value in (used.meta.get("val") for used in node.all_input_nodes)
        if isinstance(value, torch.Tensor)
    ]
    own = node.meta.get("val")
    out = own[0] if isinstance(own, list | tuple) and own else own
    if not isinstance(out, torch.Tensor) or not shapes:
        return 0.0
    numel = float(math.prod(sizes(out)))
    if name in _PRODUCTS:
        factors = shapes[-2:] if len(shapes) > 1 else shapes
        return 2.0 * numel * factors[0][-1]
    if "convolution" in name and len(shapes) > 1:
        passes = 2.0 if "backward" in name else 1.0
        weight = shapes[2] if "backward" in name and len(shapes) > 2 else shapes[1]
        result = float(math.prod(shapes[0])) if "backward" in name else numel
        return passes * 2.0 * result * math.prod(weight[1:])
    if is_attention(node) and len(shapes) > 1:
        return 4.0 * math.prod(shapes[0]) * shapes[1][-2]
    return 0.0
