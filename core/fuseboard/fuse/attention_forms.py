"""Attention written out, in a graph of Dynamo's: softmax(Q K^T * scale + mask) V, in its forms.

Matched from the softmax both ways. Each step between the two products has to be read by the next
one alone: who returns the probabilities wants them computed. Which values appear where is all that
is looked at; what torch's kernels can do with these isn't decided here.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

F = torch.nn.functional

_SOFTMAX = {F.softmax, torch.softmax, "softmax"}
_PRODUCT = {torch.matmul, torch.bmm, operator.matmul, "matmul", "bmm", "__matmul__"}
_SUM = {operator.add, torch.add, "add", "__add__"}
_SCALED = {operator.mul, torch.mul, torch.multiply, "mul", "multiply", "__mul__"}
_DIVIDED = {operator.truediv, torch.div, torch.true_divide, "div", "__truediv__"}
_FILLED = {torch.masked_fill, "masked_fill"}
_CHOSEN = {torch.where, "where"}
_CAST = {"to", "float", "half", "bfloat16", "double", "type", "type_as"}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_DROPPED = {F.dropout, torch.dropout}
_SWAPPED = {torch.transpose, "transpose", "swapaxes", torch.swapaxes}
_PERMUTED = {torch.permute, "permute"}
_EINSUM = {torch.einsum, torch.functional.einsum}


@dataclass(frozen=True)
class Mask:
    """What is added to scores, or where they are replaced by a number.

    :ivar node: added; or a boolean mask of where the number goes.
    :ivar fill: the number; None where the node is added.
    :ivar inverted: the number goes where the mask is False.
    """

    node: Node
    fill: float | None = None
    inverted: bool = False


@dataclass(frozen=True)
class Operand:
    """A node read with its dimensions in another order: None means as they are."""

    node: Node
    order: tuple[int, ...] | None = None


@dataclass
class Attention:
    """One attention: query, key and value end in (tokens, size of a head).

    :ivar scale: of the scores.
    :ivar masks: in the order in which they come after the first product.
    :ivar result: the node that has the result, the last one of ``nodes``.
    :ivar result_order: of its dimensions, from batch, heads, tokens, size.
    :ivar nodes: what is computed otherwise, each from the one before it.
    """

    softmax: Node
    query: Operand
    key: Operand
    value: Operand
    scale: float
    masks: list[Mask]
    result: Node
    result_order: tuple[int, ...] | None
    dropout: float
    nodes: list[Node] = field(default_factory=list)


def softmaxes(graph: GraphModule) -> list[Node]:
    """The softmaxes over last dimensions, each of which may be that of an attention."""
    return [node for node in graph.graph.nodes if _calls(node, _SOFTMAX) and _over_the_last(node)]


# --- from the softmax -----------------------------------------------------------------------------


def around(softmax: Node) -> Attention | None:
    """The attention that a softmax is a part of; those of two softmaxes don't overlap."""
    below = _below(softmax)
    above = _above(softmax, below[-1]) if below is not None else None
    if below is None or above is None:
        return None
    value, result, result_order, dropout, after = below
    query, key, scale, masks, before = above
    nodes = [*reversed(before), softmax, *after]
    return Attention(softmax, query, key, value, scale, masks, result, result_order, dropout, nodes)


def _below(
    softmax: Node,
) -> tuple[Operand, Node, tuple[int, ...] | None, float, list[Node]] | None:
    """From the probabilities to the second product."""
    node, nodes, dropout = softmax, [], 0.0
    while len(node.users) == 1:
        (reader,) = node.users
        nodes.append(reader)
        if _is_cast(reader) and _first(reader) is node:
            node = reader
        elif _calls(reader, _DROPPED) and _first(reader) is node and not dropout:
            rate = _dropped(reader)
            if rate is None:
                return None
            dropout, node = rate, reader
        elif _calls(reader, _PRODUCT):
            left, right = _operands(reader)
            if left is not node or not isinstance(right, Node) or right is node:
                return None
            return Operand(right), reader, None, dropout, nodes
        elif _calls(reader, _EINSUM):
            found = _second_einsum(reader, node)
            return None if found is None else (found[0], reader, found[1], dropout, nodes)
        else:
            return None
    return None


def _above(
    softmax: Node, below: list[Node]
) -> tuple[Operand, Operand, float, list[Mask], list[Node]] | None:
    """From the first product to the softmax.

    :param below: what comes after it. A cast there may look at scores for their dtype.
    """
    node, scale = _first(softmax), 1.0
    nodes: list[Node] = []
    masks: list[Mask] = []
    while isinstance(node, Node) and _shape(node) == _shape(softmax):
        if sum(reader not in below for reader in node.users) != 1:
            return None
        nodes.append(node)
        if _calls(node, _PRODUCT):
            query, transposed = _operands(node)
            if not isinstance(query, Node) or not isinstance(transposed, Node):
                return None
            return Operand(query), _transposed(transposed), scale, masks[::-1], nodes
        if _calls(node, _EINSUM):
            found = _first_einsum(node)
            return None if found is None else (*found, scale, masks[::-1], nodes)
        if _calls(node, {torch.baddbmm, "baddbmm"}):
            return _from_baddbmm(node, scale, masks, nodes)
        if _is_cast(node):
            node = _first(node)
        elif _calls(node, _SCALED | _DIVIDED):
            factor = _factor(node)
            if factor is None:
                return None
            node, scale = _scores_of(node), scale * factor
        else:
            step = _masked(node)
            # What was added before scores were scaled was scaled with them.
            if step is None or scale != 1.0:
                return None
            node, mask = step
            masks.append(mask)
    return None


def _from_baddbmm(
    node: Node, scale: float, masks: list[Mask], nodes: list[Node]
) -> tuple[Operand, Operand, float, list[Mask], list[Node]] | None:
    """``beta * mask + alpha * product``; beta 0 means that the first isn't looked at."""
    args: Any = (*node.args, None, None, None)
    added, query, transposed = args[:3]
    beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))
    if not all(isinstance(one, Node) for one in (added, query, transposed)):
        return None
    if not isinstance(alpha, int | float) or beta not in (0, 1) or (beta and scale != 1.0):
        return None
    found = [*masks, Mask(added)] if beta else masks
    return Operand(query), _transposed(transposed), scale * alpha, found[::-1], nodes


def _masked(node: Node) -> tuple[Any, Mask] | None:
    """The scores that a mask is put on, and the mask."""
    if _calls(node, _SUM) and node.kwargs.get("alpha", 1) == 1 and len(node.args) == 2:
        scores, added = _sides(node)
        return (scores, Mask(added)) if isinstance(added, Node) else None
    args: Any = node.args
    if _calls(node, _FILLED) and len(args) == 3:
        scores, mask, fill = args
        number = _number(fill)
        usable = isinstance(mask, Node) and number is not None
        return (scores, Mask(mask, number)) if usable else None
    if _calls(node, _CHOSEN) and len(args) == 3:
        # As a method it is called on what is taken where the condition holds.
        is_method = node.op == "call_method"
        first, second, other = args
        scores, mask = (first, second) if is_method else (second, first)
        number = _number(other)
        usable = isinstance(mask, Node) and number is not None
        return (scores, Mask(mask, number, inverted=True)) if usable else None
    return None


def _sides(node: Node) -> tuple[Any, Any]:
    """Of two terms the scores, which come from a product, and the other one."""
    first, second = node.args
    if _leads_to_product(second) and not _leads_to_product(first):
        return second, first
    return first, second


def _leads_to_product(node: Any) -> bool:
    steps = _SCALED | _DIVIDED | _SUM | _FILLED | _CAST
    for _ in range(6):
        if not isinstance(node, Node) or len(node.users) != 1:
            return False
        if _calls(node, _PRODUCT | _EINSUM):
            return True
        if not _calls(node, steps):
            return False
        node = _scores_of(node)
    return False


# --- nodes ----------------------------------------------------------------------------------------


def _is_cast(node: Node) -> bool:
    """Whether a node gives the same values in another dtype, but for roundings."""
    value = _value(node)
    return _calls(node, _CAST) and value is not None and value.dtype in _FLOATS


def _calls(node: Any, targets: set[Any]) -> bool:
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return False
    return isinstance(node.target, str) == (node.op == "call_method") and node.target in targets


def _first(node: Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("input")


def _operands(node: Node) -> tuple[Any, Any]:
    second = {**node.kwargs}.get("other", node.kwargs.get("mat2"))
    return _first(node), node.args[1] if len(node.args) > 1 else second


def _scores_of(node: Node) -> Any:
    """The factor that isn't a number."""
    first = _first(node)
    return first if isinstance(first, Node) else _operands(node)[1]


def _factor(node: Node) -> float | None:
    """What scores are multiplied by; None where that isn't a number."""
    first, second = _operands(node)
    if node.kwargs:
        return None
    if _calls(node, _DIVIDED):
        return 1.0 / second if isinstance(second, int | float) and second else None
    numbers = [one for one in (first, second) if isinstance(one, int | float)]
    return float(numbers[0]) if len(numbers) == 1 else None


def _number(value: Any) -> float | None:
    """A number, or the one that a tensor of no dimensions is made of."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if _calls(value, {torch.tensor}):
        return _number(value.args[0])
    if _calls(value, {torch.full}) and tuple(value.args[0]) == ():
        return _number(value.args[1])
    return None


def _dropped(node: Node) -> float | None:
    """Which share a dropout leaves out; None where it writes to its input."""
    names = ("input", "p", "training", "inplace")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if given.get("inplace"):
        return None
    trains = given.get("training", True)
    rate = given.get("p", 0.5)
    return float(rate) if trains and isinstance(rate, int | float) else 0.0


def _over_the_last(node: Node) -> bool:
    at = 1
    dim = node.args[at] if len(node.args) > at else node.kwargs.get("dim")
    value = _value(node)
    return value is not None and dim in (-1, value.dim() - 1)


def _value(node: Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def _shape(node: Node) -> Any:
    value = _value(node)
    return None if value is None else tuple(value.shape)


def _transposed(node: Node) -> Operand:
    """What the second operand of the first product is the transpose of."""
    value = _value(node)
    last = value.dim() - 1 if value is not None else 0
    swapped = (*range(last - 1), last, last - 1)
    if _calls(node, _SWAPPED) and len(node.args) == 3:
        dims = {d % (last + 1) if isinstance(d, int) else d for d in node.args[1:]}
        if dims == {last, last - 1} and isinstance(node.args[0], Node):
            return Operand(node.args[0])
    if _calls(node, _PERMUTED) and isinstance(node.args[0], Node):
        rest: Any = node.args[1:]
        order = rest[0] if isinstance(rest[0], tuple | list) else rest
        plain = [d % (last + 1) for d in order if isinstance(d, int)]
        if tuple(plain) == swapped:
            return Operand(node.args[0])
    return Operand(node, swapped)


# --- einsum ---------------------------------------------------------------------------------------


def _equation(node: Node) -> tuple[str, str, str, Node, Node] | None:
    """The letters of two operands and of the result, and the operands."""
    if len(node.args) != 3 or not isinstance(node.args[0], str):
        return None
    args: Any = node.args
    text, left, right = args
    operands, arrow, result = text.replace(" ", "").partition("->")
    first, comma, second = operands.partition(",")
    plain = (first + second + result).isalpha() and arrow and comma
    if not plain or not isinstance(left, Node) or not isinstance(right, Node):
        return None
    unique = all(len(set(word)) == len(word) for word in (first, second, result))
    return (first, second, result, left, right) if unique else None


def _first_einsum(node: Node) -> tuple[Operand, Operand] | None:
    """Query and key of scores that are laid out as (..., tokens, tokens)."""
    found = _equation(node)
    if found is None:
        return None
    first, second, result, left, right = found
    if len(result) < 3:
        return None
    batch, of_query, of_key = result[:-2], result[-2], result[-1]
    contracted = (set(first) & set(second)) - set(result)
    if len(contracted) != 1:
        return None
    (inner,) = contracted
    if set(first) != {*batch, of_query, inner} or set(second) != {*batch, of_key, inner}:
        return None
    query = tuple(first.index(one) for one in (*batch, of_query, inner))
    key = tuple(second.index(one) for one in (*batch, of_key, inner))
    return Operand(left, query), Operand(right, key)


def _second_einsum(node: Node, probabilities: Node) -> tuple[Operand, tuple[int, ...]] | None:
    """The value, and how the result's dimensions are ordered."""
    found = _equation(node)
    if found is None or found[3] is not probabilities or found[4] is probabilities:
        return None
    first, second, result, _, right = found
    if len(first) < 3:
        return None
    batch, of_query, of_key = first[:-2], first[-2], first[-1]
    sizes = set(second) - set(first)
    if len(sizes) != 1 or set(second) != {*batch, of_key, *sizes}:
        return None
    (size,) = sizes
    made = (*batch, of_query, size)
    if sorted(made) != sorted(result):
        return None
    value = tuple(second.index(one) for one in (*batch, of_key, size))
    return Operand(right, value), tuple(made.index(one) for one in result)
