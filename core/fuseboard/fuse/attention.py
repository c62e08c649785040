"""Attention written out becomes ``scaled_dot_product_attention``: a pass over Dynamo's graphs.

There a model's formula is as its author wrote it, whichever backends there are, and autograd makes
the backward of what stands in its place. It is done where torch has a fused kernel for it, which
holds no matrix of scores, neither in a call nor for the backward. So not for a dropout on CPU, nor
for a mask with a gradient, and not where a kernel would draw other numbers than eager.

torch's kernels give zeros in a row that is masked as a whole, eager NaNs (what it divides by is 0).
Where a mask isn't known to leave something, results are multiplied by NaN in such rows, so that
gradients are eager's as well. Off unless it is asked for (``fuse_attention``): in a row that is
masked as a whole by a finite number (-1e38, say) torch's backward is wrong, by as many times as
there are keys; and since the kernels add masks, NaN spread from keys that a mask replaces, and into
the gradients of rows that ``masked_fill`` replaces as a whole. Only the call that is compiled is
held against eager.

Inductor matches traced graphs (``torch/_inductor/fx_passes/fuse_attention.py`` of 2.13): one for
each dtype, batch of one and dropout, at the level of its own decompositions. Forms are fewer here.
"""

from __future__ import annotations

import math
import operator
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.contracts import Fusion, Random
from fuseboard.fuse.attention_forms import Attention, Mask, Operand, around, softmaxes
from fuseboard.fuse.interruptions import has_effects, interrupted
from fuseboard.hookspecs import hookimpl
from fuseboard.torch_api.attention import fused_attention

F = torch.nn.functional
NAN, INF = math.nan, math.inf

#: Scores that are replaced by so little, or less, are lost in a sum with it.
_LOST = -1e30


@hookimpl
def fuseboard_fuse_dynamo(graph: GraphModule, random: Random) -> list[Fusion] | None:
    """Offer to write each attention that a fused kernel can run as one op."""
    if any(map(_opens_a_level, graph.graph.nodes)):
        return None
    found = [one for one in map(around, softmaxes(graph)) if one is not None]
    return [
        Fusion("attention", tuple(n.name for n in one.nodes), partial(_rewrite, graph, one.softmax))
        for one in found
        if _fits(one, random)
    ]


# --- whether a kernel can run it ------------------------------------------------------------------


def _opens_a_level(node: Node) -> bool:
    """Whether a node begins a transform of ``torch.func``, which may want second gradients."""
    return "_increment_nesting" in getattr(node.target, "__name__", "")


def _keeps_precision(query: torch.Tensor) -> bool:
    """Whether kernels of a device compute as exactly, and as repeatably, as the user asks for."""
    if query.device.type == "cpu":
        return True
    # What kernels of CUDA take for float32.
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    exact = query.dtype != torch.float32 or tf32
    return exact and not torch.are_deterministic_algorithms_enabled()


def _fits(found: Attention, random: Random) -> bool:
    operands = [_laid_out(one) for one in (found.query, found.key, found.value)]
    wanted = found.result.meta.get("val")
    if any(one is None for one in operands) or not isinstance(wanted, torch.Tensor):
        return False
    query, key, value = operands
    if query.dim() not in (3, 4) or not query.dtype.is_floating_point:
        return False
    if not _keeps_precision(query):
        return False
    if interrupted(found.nodes) or not _add_up(found.masks):
        return False
    alike = query.dim() == key.dim() == value.dim()
    batch = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    if not alike or not batch or (found.dropout and random == "eager"):
        return False
    if not all(_can_mask(mask, query) for mask in found.masks):
        return False
    try:
        made = fused_attention(
            *(one if one.dim() == 4 else one.unsqueeze(0) for one in operands),
            attn_mask=_example_mask(found.masks, query, key),
            dropout_p=found.dropout,
            scale=found.scale,
        )
    except Exception:  # sizes that torch refuses, or that a symbol doesn't tell
        return False
    return made is not None and made.dtype == wanted.dtype and made.numel() == wanted.numel()


def _laid_out(operand: Operand) -> Any:
    value = operand.node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return value if operand.order is None else value.permute(operand.order)


def _add_up(masks: list[Mask]) -> bool:
    """Whether masks do in a sum what they do in turn: a number replaces what was added before."""
    finite = True
    for mask in masks:
        if mask.fill is not None and mask.fill != -INF and not finite:
            return False
        finite = finite and (_is_finite(mask.node) if mask.fill is None else mask.fill != -INF)
    return True


def _can_mask(mask: Mask, query: torch.Tensor) -> bool:
    value = mask.node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not 1 <= value.dim() <= query.dim():
        return False
    if mask.fill is None:
        return value.dtype == query.dtype
    return value.dtype == torch.bool and mask.fill <= max(_LOST, torch.finfo(query.dtype).min)


def _example_mask(masks: list[Mask], query: torch.Tensor, key: torch.Tensor) -> Any:
    """A fake mask like the one that would be given."""
    if not masks:
        return None
    values = [mask.node.meta["val"] for mask in masks]
    shape = torch.broadcast_shapes(*(value.shape for value in values))
    made = query.new_zeros((*(1,) * (4 - len(shape)), *shape))
    needs_grad = any(v.requires_grad for v in values) and torch.is_grad_enabled()
    return made.requires_grad_(needs_grad)


# --- what stands in its place ---------------------------------------------------------------------


def _rewrite(graph: GraphModule, softmax: Node) -> None:
    """Write the op before the result's node, and take out what computed that."""
    found = around(softmax)  # what it reads may be the result of another one by now
    assert found is not None
    result = found.result
    write = _Writer(graph, result)
    operands = [write.laid_out(one) for one in (found.query, found.key, found.value)]
    flat = found.query.node.meta["val"].dim() == 3
    if flat:
        operands = [write.method("unsqueeze", one, 0) for one in operands]
    mask, lost = _masks(write, found)
    made = write.function(
        F.scaled_dot_product_attention,
        *operands,
        attn_mask=mask,
        dropout_p=found.dropout,
        scale=found.scale,
    )
    if lost is not None:
        made = write.function(operator.mul, made, lost)
    if flat:
        made = write.method("squeeze", made, 0)
    if not _is_laid_out_anew(result, found.result_order):
        made = write.method("contiguous", made)
    if found.result_order is not None:
        made = write.method("permute", made, found.result_order)
    result.replace_all_uses_with(made)
    for node in reversed(found.nodes):
        graph.graph.erase_node(node)


class _Writer:
    """Adds nodes before one, with their fake values."""

    def __init__(self, graph: GraphModule, before: Node) -> None:
        self._graph = graph.graph
        self._before = before

    def function(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self._add("call_function", target, args, kwargs, target)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        return self._add("call_method", name, args, kwargs, getattr(torch.Tensor, name))

    def laid_out(self, operand: Operand) -> Node:
        if operand.order is None:
            return operand.node
        return self.method("permute", operand.node, operand.order)

    def _add(self, op: str, target: Any, args: Any, kwargs: Any, function: Any) -> Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.create_node(op, target, args, kwargs)
        node.meta.update(
            {k: v for k, v in self._before.meta.items() if k not in ("val", "example_value")}
        )
        args, kwargs = torch.fx.node.map_arg((args, kwargs), lambda one: one.meta["val"])
        node.meta["val"] = function(*args, **kwargs)
        return node


def _masks(write: _Writer, found: Attention) -> tuple[Node | None, Node | None]:
    """What is added to the scores; and NaN for rows of which nothing is left, else 1."""
    query = found.query.node.meta["val"]
    total: Node | None = None
    certain = True
    for mask in found.masks:
        added = mask.node
        if mask.fill is not None:
            gone = write.method("logical_not", added) if mask.inverted else added
            zeros = write.function(torch.zeros_like, gone, dtype=query.dtype)
            added = write.method("masked_fill", zeros, gone, mask.fill)
        certain = certain and total is None and _is_finite(added)
        total = added if total is None else write.function(operator.add, total, added)
    if total is None:
        return None, None
    for _ in range(4 - total.meta["val"].dim()):
        total = write.method("unsqueeze", total, 0)
    if certain:
        return total, None
    gone = write.function(operator.eq, total, -INF)
    empty = write.method("all", gone, -1, True)
    ones = write.function(torch.ones_like, empty, dtype=query.dtype)
    return total, write.method("masked_fill", ones, empty, NAN)


#: What gives none but the values that it is given.
_MOVES = {
    *("expand", "unsqueeze", "squeeze", "view", "reshape", "permute", "transpose", "contiguous"),
    *("clone", "detach", "repeat", "expand_as"),
    operator.getitem,
}


def _is_finite(node: Any) -> bool:
    """Whether nothing but finite numbers can be in a node's value."""
    if isinstance(node, int | float):
        return math.isfinite(node)
    if not isinstance(node, Node) or any(map(has_effects, node.users)):
        return False  # what it is made as may not be what it is read as
    if node.target in _MOVES and node.op != "placeholder":
        return _is_finite(node.args[0])
    if node.target in (torch.where, "where") and len(node.args) == 3:
        values = node.args[1:] if node.op == "call_function" else (node.args[0], node.args[2])
        return all(map(_is_finite, values))
    if node.target in ("masked_fill", torch.masked_fill) and len(node.args) == 3:
        return _is_finite(node.args[0]) and _is_finite(node.args[2])
    if node.target in (torch.zeros, torch.zeros_like, torch.ones, torch.ones_like):
        return True
    if node.target is torch.tensor:
        return _is_finite(node.args[0])
    if node.target in (torch.full, torch.full_like):
        fill = node.args[1] if len(node.args) > 1 else node.kwargs.get("fill_value")
        return _is_finite(fill)
    return False


#: What makes the same of a value however it is laid out.
_INDIFFERENT = {"contiguous", "reshape"}


def _is_laid_out_anew(result: Node, order: tuple[int, ...] | None) -> bool:
    """Whether nobody sees the strides of a result: it is transposed and then laid out anew."""
    if order is not None or result.meta["val"].dim() != 4:
        return False
    for reader in result.users:
        swapped = reader.op == "call_method" and reader.target == "transpose"
        if not swapped or set(reader.args[1:]) != {1, 2}:
            return False
        if any(n.op != "call_method" or n.target not in _INDIFFERENT for n in reader.users):
            return False
    return True
