"""Attention written out becomes one op, ``fuseboard::attention``: a pass over Dynamo's graphs.

There a model's formula is as its author wrote it, whichever backends there are, and autograd makes
the backward of what stands in its place. It is done where torch has a fused kernel for it on CPU,
which holds no matrix of scores, neither in a call nor for the backward. So not for a dropout. What
the kernel computes otherwise than the formula, the op computes by the formula
(:mod:`fuseboard.ops.attention`), which it is given as steps and the masks that they read; ``bias``
is what the kernel adds to the scores in their place. So it computes gradients of masks, for which
it computes scores twice: that pays where they are many.

Inductor matches traced graphs (``torch/_inductor/fx_passes/fuse_attention.py`` of 2.13): one for
each dtype, batch of one and dropout, at the level of its own decompositions. Forms are fewer here.
Attention on accelerators is left to it.
"""

from __future__ import annotations

import math
import operator
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.contracts import Fusion
from fuseboard.fuse.attention_forms import Attention, around, softmaxes
from fuseboard.fuse.interruptions import has_effects, interrupted, opens_a_level
from fuseboard.fuse.reading import Operand, value_of
from fuseboard.fuse.saved_inputs import copied, is_the_users, memory, requires_grad
from fuseboard.fuse.writing import Writer
from fuseboard.hookspecs import hookimpl
from fuseboard.ops.attention import NO_WEIGHT, attention, side_by_side
from fuseboard.ops.attention_formula import MASKS, Step, written
from fuseboard.ops.estimate import sizes
from fuseboard.torch_api.attention import is_fused

#: Scores below which a call of the op, some 60 us on a server's core, costs more than the formula.
LEAST_SCORES = 1 << 14
#: The gradient of a mask takes computing scores twice. Memory that isn't asked for makes up for
#: that where probabilities take 32 MiB: glibc asks the system anew for as much, and pages are
#: cleared. Time of Inductor's formula, one core: 0.8 of it at 4 x 12 heads of 512 tokens; 1.0 at
#: 4 x 8, 1.2 at 1 x 8; and 1.1 for windows of 49 tokens, however many.
LEAST_SCORES_WITH_GRADIENT = 1 << 23
LEAST_KEYS_WITH_GRADIENT = 128

_HALVES = {torch.float16, torch.bfloat16}


@hookimpl
def fuseboard_fuse_dynamo(graph: GraphModule) -> list[Fusion] | None:
    """Offer to write each attention that the fused kernel can run as one op."""
    if any(map(opens_a_level, graph.graph.nodes)):
        return None
    found = [one for one in map(around, softmaxes(graph)) if one is not None]
    return [
        Fusion("attention", tuple(n.name for n in one.nodes), partial(_rewrite, graph, one.softmax))
        for one in found
        if _fits(one)
    ]


# --- whether the kernel can run it ----------------------------------------------------------------


def _fits(found: Attention) -> bool:
    wanted, product = (value_of(one) for one in (found.result, found.product))
    if wanted is None or product is None or not product.dtype.is_floating_point:
        return False
    if interrupted(found.nodes) or not _pays(found, sizes(product)):
        return False
    operands = [_laid_out(one) for one in (found.query, found.key, found.value)]
    if any(one is None or one.dim() not in (3, 4) for one in operands):
        return False
    query, key, value = (one.to(product.dtype) for one in operands)
    alike = query.dim() == key.dim() == value.dim() == product.dim()
    batch = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    if not alike or not batch or len(found.masks) > MASKS or query.device.type != "cpu":
        return False
    if not all(_can_mask(step, found, query) for step in found.steps if step.mask >= 0):
        return False
    if _writes_mask_later(found):
        return False
    q, k, v = (
        side_by_side(one if one.dim() == 4 else one.unsqueeze(0)) for one in (query, key, value)
    )
    try:
        if not is_fused(q, k, v, _example_mask(found, query)):
            return False
    except Exception:  # sizes that torch refuses, or that a symbol doesn't tell
        return False
    return _is_as_wanted(query, found, wanted)


def _pays(found: Attention, scores: list[int]) -> bool:
    """Whether the op takes no longer than the formula for scores of these sizes."""
    count, values = math.prod(scores), map(value_of, found.masks)
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in values):
        return count >= LEAST_SCORES_WITH_GRADIENT and scores[-1] >= LEAST_KEYS_WITH_GRADIENT
    return count >= LEAST_SCORES


def _laid_out(operand: Operand) -> Any:
    value = value_of(operand.node)
    return value if value is None or operand.order is None else value.permute(operand.order)


def _can_mask(step: Step, found: Attention, query: torch.Tensor) -> bool:
    value = value_of(found.masks[step.mask])
    if value is None or not 1 <= value.dim() <= query.dim():
        return False
    if step.kind == "add":
        # The kernel takes a mask of its operands' dtype, and of float32 for halves.
        wide = value.dtype == torch.float32 and query.dtype in _HALVES
        return value.dtype == query.dtype or wide
    return value.dtype == torch.bool and step.number <= NO_WEIGHT


def _writes_mask_later(found: Attention) -> bool:
    """Whether masks are written to before the backward, for which a sum doesn't save them."""
    if not torch.is_grad_enabled():
        return False
    masks = {address for mask in found.masks for address in memory(mask)}
    node = found.result
    while node.op != "root":
        if has_effects(node) and not masks.isdisjoint(
            address for used in node.all_input_nodes for address in memory(used)
        ):
            return True
        node = node.next
    return False


def _example_mask(found: Attention, query: torch.Tensor) -> torch.Tensor | None:
    """A fake mask like the one that would be given."""
    values = [value for value in map(value_of, found.masks) if value is not None]
    if not values:
        return None
    shape = torch.broadcast_shapes(*(value.shape for value in values))
    return query.new_zeros((*(1,) * (4 - len(shape)), *shape))


def _is_as_wanted(query: torch.Tensor, found: Attention, wanted: torch.Tensor) -> bool:
    """Whether a result laid out by rows has the form of what it stands for, strides too."""
    made = torch.empty_like(query, memory_format=torch.contiguous_format)
    made = made if found.result_order is None else made.permute(found.result_order)
    if made.dtype != wanted.dtype or made.shape != wanted.shape:
        return False
    strides = (*made.stride(), *wanted.stride())
    known = all(isinstance(stride, int) for stride in strides)
    return not known or made.stride() == wanted.stride()


# --- what stands in its place ---------------------------------------------------------------------


def _rewrite(graph: GraphModule, softmax: Node) -> None:
    """Write the op before the result's node, and take out what computed that."""
    found = around(softmax)  # what it reads may be the result of another one by now
    assert found is not None
    result, dtype = found.result, found.product.meta["val"].dtype
    write = _Writer(graph, result)
    for one in _saved_besides(found):
        _read_a_copy(found, one, copied(write, one, result))
    operands = [write.laid_out(one, dtype) for one in (found.query, found.key, found.value)]
    flat = operands[0].meta["val"].dim() == 3
    if flat:
        operands = [write.method("unsqueeze", one, 0) for one in operands]
    bias = _bias(write, found, dtype)
    steps = written(found.steps, dtype)
    masks = (*found.masks, *[None] * (MASKS - len(found.masks)))
    made = write.function(attention, *operands, bias, *masks, steps)
    made = write.function(operator.getitem, made, 0)
    if flat:
        made = write.method("squeeze", made, 0)
    copies = _laid_out_anew(result, found.result_order)
    if _is_written(result, copies):
        # The op's result is saved for its backward, as that of a product isn't.
        made = write.method("clone", made, memory_format=torch.contiguous_format)
    elif not copies:
        made = write.method("contiguous", made)
    if found.result_order is not None:
        made = write.method("permute", made, found.result_order)
    result.replace_all_uses_with(made)
    for node in reversed(found.nodes):
        graph.graph.erase_node(node)


def _saved_besides(found: Attention) -> list[Node]:
    """What the user may write to, and the op saves for its backward where the formula doesn't.

    A sum saves no mask; a product saves what it reads, which may be a multiple of the query, where
    the other one has a gradient. What replaces scores saves its mask.
    """
    query, key, value = (one.node for one in (found.query, found.key, found.value))
    scored = [query, key, *found.masks]
    if not any(map(requires_grad, (*scored, value))):
        return []
    added = {found.masks[step.mask] for step in found.steps if step.kind == "add"}
    read = {address for one in found.product.all_input_nodes for address in memory(one)}
    formula = {
        query: not read.isdisjoint(memory(query)) and requires_grad(key),
        key: not read.isdisjoint(memory(key)) and requires_grad(query),
        value: any(map(requires_grad, scored)),
        **{mask: mask not in added for mask in found.masks},
    }
    return [one for one, saves in formula.items() if not saves and is_the_users(one)]


def _read_a_copy(found: Attention, node: Node, copy: Node) -> None:
    found.masks = [copy if one is node else one for one in found.masks]
    for name in ("query", "key", "value"):
        operand = getattr(found, name)
        if operand.node is node:
            setattr(found, name, Operand(copy, operand.order))


class _Writer(Writer):
    """Lays operands out as well."""

    def laid_out(self, operand: Operand, dtype: torch.dtype) -> Node:
        """An operand in the op's order; in the product's dtype, to which autocast may cast it."""
        node = operand.node
        if node.meta["val"].dtype != dtype:
            node = self.method("to", node, dtype)
        return node if operand.order is None else self.method("permute", node, operand.order)


def _bias(write: _Writer, found: Attention, dtype: torch.dtype) -> Node | None:
    """What is added to scores for all masks together.

    Where a mask replaces them that is ``-inf``: nothing of a score is left, and if it was none,
    the sum is NaN. A mask that is added afterwards may make much of such a place again, which a
    sum can't tell: there NaN has the op compute the formula.
    """
    masking = [step for step in found.steps if step.mask >= 0]
    if not masking:
        return None
    kinds = [step.kind != "add" for step in masking]
    doubtful = True in kinds and not all(kinds[kinds.index(True) :])
    # Any number that a score is replaced by is one of float32's.
    wide = torch.promote_types(dtype, torch.float32) if doubtful else dtype
    total: Node | None = None
    replaced: Node | None = None
    for step in masking:
        mask = found.masks[step.mask]
        if step.kind == "add":
            added = write.method("to", mask, wide) if doubtful else mask
            total = added if total is None else write.function(operator.add, total, added)
            continue
        gone = write.method("logical_not", mask) if step.kind == "keep" else mask
        if total is None:
            total = write.function(torch.zeros_like, gone, dtype=wide)
        number = step.number if doubtful else -math.inf
        total = write.function(torch.masked_fill, total, gone, number)
        replaced = gone if replaced is None else write.function(operator.or_, replaced, gone)
    assert total is not None
    if doubtful:
        light = write.function(operator.le, total, NO_WEIGHT)
        heavy = write.function(operator.and_, replaced, write.method("logical_not", light))
        total = write.function(torch.masked_fill, total, replaced, -math.inf)
        total = write.function(torch.masked_fill, total, heavy, math.nan)
    for _ in range(4 - total.meta["val"].dim()):
        total = write.method("unsqueeze", total, 0)
    return total


# --- what is done with the result -----------------------------------------------------------------


def _is_written(result: Node, copies: list[Node]) -> bool:
    """Whether anyone may write to the result or to its copies, be it after the call."""
    own = {address for node in (result, *copies) for address in memory(node)}
    return any(
        not own.isdisjoint(address for used in node.all_input_nodes for address in memory(used))
        for node in result.graph.nodes
        if node.op == "output" or has_effects(node)
    )


#: What makes the same of a value however it is laid out.
_INDIFFERENT = {"contiguous", "reshape"}


def _laid_out_anew(result: Node, order: tuple[int, ...] | None) -> list[Node]:
    """The copies by which alone a result is read, transposed; none if its strides are seen."""
    if order is not None or result.meta["val"].dim() != 4:
        return []
    copies: list[Node] = []
    for reader in result.users:
        swapped = reader.op == "call_method" and reader.target == "transpose"
        if not swapped or set(reader.args[1:]) != {1, 2}:
            return []
        if any(n.op != "call_method" or n.target not in _INDIFFERENT for n in reader.users):
            return []
        copies.extend(reader.users)
    return copies
