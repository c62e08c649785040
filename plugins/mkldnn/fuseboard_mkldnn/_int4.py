"""Weights of 4 bits with a scale for each group of inputs, for ATen's kernel.

``_weight_int4pack_mm_for_cpu`` computes ``(q - 8) * scale + zero``, with ``q`` from 0 to 15.
Weights of another form aren't brought to it: in bfloat16 that would round once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fuseboard_mkldnn import _ops
from fuseboard_mkldnn._graph import Editor, aten, calls, tensor
from fuseboard_mkldnn._quantised_weight import SIZED_VIEWS, QuantisedWeight, bounds, untransposed

#: The kernel's sizes of groups, and what it has to divide N by on any CPU.
GROUPS = (32, 64, 128, 256)
N_MULTIPLE = 64


@dataclass(frozen=True)
class Grouped:
    """A weight as the kernel computes it.

    :ivar numbers: from 0 to 15, (N, groups, K / groups) or (N, K).
    :ivar scale: (N, groups, 1).
    :ivar zero: what is added in the end, (N, groups, 1); None for 0.
    """

    numbers: Node
    scale: Node
    zero: Node | None
    n: int
    k: int
    groups: int


def grouped(weight: QuantisedWeight) -> Grouped | None:
    """A weight of that form, or None."""
    if weight.scaled is not None or weight.rows[weight.root] != 1:
        return None
    node = untransposed(weight.root)
    n, k = tensor(node).shape
    node = _unviewed(node)
    zero = None
    if calls(node, aten.add.Tensor) and len(node.args) == 2 and not node.kwargs:
        node, zero = node.args
    if not (isinstance(node, Node) and calls(node, aten.mul.Tensor)):
        return None
    value = tensor(node)
    if value.dim() != 3 or value.shape[0] != n or value.shape[2] not in GROUPS or n % N_MULTIPLE:
        return None
    shifted, scale = node.args
    for one in (scale,) if zero is None else (scale, zero):
        found = tensor(one)
        if found is None or found.shape != (*value.shape[:2], 1) or found.dtype != value.dtype:
            return None
    numbers = _unshifted(shifted)
    if numbers is None or scale in weight.nodes or zero in weight.nodes:
        return None
    low, high = bounds(numbers) or (-1, -1)
    fits = low >= 0 and high <= 15 and tensor(numbers).numel() == n * k
    return Grouped(numbers, scale, zero, n, k, value.shape[1]) if fits else None


def _unviewed(node: Any) -> Any:
    while calls(node, *SIZED_VIEWS):
        node = node.args[0]
    return node


def _unshifted(node: Any) -> Node | None:
    """The integers of which 8 is subtracted, before they become floats or after."""
    shifted = False
    while isinstance(node, Node):
        if calls(node, aten.sub.Tensor) and node.args[1] == 8 and not shifted and not node.kwargs:
            shifted, node = True, node.args[0]
        elif calls(node, aten._to_copy.default) and tensor(node).dtype.is_floating_point:
            node = node.args[0]
        else:
            break
    integers = isinstance(node, Node) and not tensor(node).dtype.is_floating_point
    return node if shifted and integers else None


def emit(edit: Editor, weight: Grouped, x: Node, product: torch.Tensor) -> Node:
    """The product by ATen's kernel; what it reads is packed outside of calls."""
    n, k, groups = weight.n, weight.k, weight.groups
    value = tensor(weight.numbers)
    numbers = edit.call(aten.reshape.default, (weight.numbers, [n, k]), value.reshape(n, k))
    wide = tensor(numbers).to(torch.int32)
    numbers = edit.call(aten._to_copy.default, (numbers,), wide, {"dtype": torch.int32})
    pack, kernel = _ops.int4_product()
    packed = edit.call(pack, (numbers, 1), wide.new_empty((n, k // 2), dtype=torch.uint8))

    def by_groups(one: Node) -> Node:
        flat = tensor(one).reshape(n, groups)
        flat_node = edit.call(aten.reshape.default, (one, [n, groups]), flat)
        return edit.call(aten.t.default, (flat_node,), flat.t())

    scale = by_groups(weight.scale)
    if weight.zero is None:
        zero = edit.call(aten.zeros_like.default, (scale,), torch.zeros_like(tensor(scale)))
    else:
        zero = by_groups(weight.zero)
    both = tensor(scale).new_empty((groups, n, 2))
    both_node = edit.call(aten.stack.default, ([scale, zero], -1), both)
    return edit.call(kernel, (x, packed, k // groups, both_node), product)


def calls_to_compare(
    x: torch.Tensor, n: int, groups: int, rows: Callable[..., torch.Tensor]
) -> tuple[dict[str, Callable[[], torch.Tensor]], torch.Tensor]:
    """The kernel, and ``rows(x, numbers, scale)``, on random ones; and the exact weight."""
    generator, k = torch.Generator().manual_seed(0), x.shape[1]
    numbers = torch.randint(0, 16, (n, k), dtype=torch.int32, generator=generator, device="cpu")
    scale = torch.rand(n, groups, 1, generator=generator, device="cpu").to(x.dtype)
    pack, kernel = _ops.int4_product()
    packed = pack(numbers, 1)
    flat = scale.view(n, groups).t()
    both = torch.stack([flat, torch.zeros_like(flat)], -1)
    held = (numbers - 8).to(torch.int8).view(n, groups, -1)
    exact = (held.double() * scale.double()).view(n, k).t()
    found = {
        "rows": lambda: rows(x, held, scale),
        "int4": lambda: kernel(x, packed, k // groups, both),
    }
    return found, exact


def scaled(numbers: torch.Tensor, scale: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A weight as (K, N) from its (N, groups, K / groups) integers and (N, groups, 1) scales."""
    return memory.copy_(numbers).mul_(scale).view(len(numbers), -1).t()
