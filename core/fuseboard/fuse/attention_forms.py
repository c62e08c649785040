"""Attention written out, in a graph of Dynamo's: softmax(Q K^T * scale + mask) V, in its forms.

Matched from the softmax both ways. Each step between the two products has to be read by the next
one alone: who returns the probabilities wants them computed. Which values appear where is all that
is looked at; what torch's kernels can do with these isn't decided here.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from fuseboard.fuse.attention_einsum import first_product, second_product
from fuseboard.fuse.reading import Operand, argument, calls, dtype_of, value_of
from fuseboard.ops.attention_formula import Step

F = torch.nn.functional

_SOFTMAX = {F.softmax, torch.softmax, "softmax"}
_PRODUCT = {torch.matmul, torch.bmm, operator.matmul, "matmul", "bmm", "__matmul__"}
# What is done in place is done to scores that the next step alone reads: nobody else sees it.
_IN_PLACE: set[Any] = {operator.iadd, operator.imul, operator.itruediv}
_IN_PLACE |= {"add_", "mul_", "div_", "masked_fill_"}
_SUM = {operator.add, torch.add, "add", "__add__", operator.iadd, "add_"}
_SCALED = {operator.mul, torch.mul, torch.multiply, "mul", "multiply", "__mul__"}
_SCALED |= {operator.imul, "mul_"}
_DIVIDED: set[Any] = {operator.truediv, torch.div, torch.true_divide, "div", "__truediv__"}
_DIVIDED |= {operator.itruediv, "div_"}
_FILLED = {torch.masked_fill, "masked_fill", "masked_fill_"}
_CHOSEN = {torch.where, "where"}
_CAST = {"to", "float", "half", "bfloat16", "double", "type", "type_as"}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_DROPPED = {F.dropout, torch.dropout}
_SWAPPED = {torch.transpose, "transpose", "swapaxes", torch.swapaxes}
_PERMUTED = {torch.permute, "permute"}
_EINSUM = {torch.einsum, torch.functional.einsum}
_SUM_WITH_PRODUCT = {torch.baddbmm, "baddbmm"}


@dataclass
class Attention:
    """One attention: query, key and value end in (tokens, size of a head).

    :ivar product: the first one; the dtype of its result is that in which both are computed.
    :ivar steps: from the first product to the second; masks are numbered as in ``masks``.
    :ivar result: the node that has the result, the last one of ``nodes``.
    :ivar result_order: of its dimensions, from batch, heads, tokens, size.
    :ivar nodes: what is computed otherwise, each from the one before it.
    """

    softmax: Node
    query: Operand
    key: Operand
    value: Operand
    product: Node
    steps: list[Step]
    masks: list[Node]
    result: Node
    result_order: tuple[int, ...] | None
    nodes: list[Node]


class _Above(NamedTuple):
    """What comes before a softmax, from the last step to the first product.

    :ivar steps: each with the mask that it reads.
    """

    steps: list[tuple[Step, Node | None]]
    nodes: list[Node]
    query: Operand
    key: Operand


class _Below(NamedTuple):
    """What comes after a softmax, to the second product."""

    steps: list[Step]
    nodes: list[Node]
    value: Operand
    result_order: tuple[int, ...] | None


def softmaxes(graph: GraphModule) -> list[Node]:
    """The softmaxes over last dimensions, each of which may be that of an attention."""
    return [node for node in graph.graph.nodes if calls(node, _SOFTMAX) and _over_the_last(node)]


# --- from the softmax -----------------------------------------------------------------------------


def around(softmax: Node) -> Attention | None:
    """The attention that a softmax is a part of; those of two softmaxes don't overlap."""
    below = _below(softmax)
    above = _above(softmax, below.nodes) if below is not None else None
    if below is None or above is None:
        return None
    masks: list[Node] = []
    steps: list[Step] = []
    for step, mask in reversed(above.steps):
        if mask is None:
            steps.append(step)
            continue
        if mask in above.nodes:
            return None  # scores added to themselves
        if mask not in masks:
            masks.append(mask)
        steps.append(Step(step.kind, step.number, masks.index(mask), step.dtype))
    steps += [Step("softmax", dtype=dtype_of(softmax)), *below.steps]
    if any(_is_narrower(step.dtype, dtype_of(above.nodes[-1])) for step in steps):
        return None  # the kernel rounds nothing on the way
    return Attention(
        softmax=softmax,
        query=above.query,
        key=above.key,
        value=below.value,
        product=above.nodes[-1],
        steps=steps,
        masks=masks,
        result=below.nodes[-1],
        result_order=below.result_order,
        nodes=[*reversed(above.nodes), softmax, *below.nodes],
    )


def _below(softmax: Node) -> _Below | None:
    """From the probabilities to the second product. A dropout has to leave nothing out."""
    steps: list[Step] = []
    nodes: list[Node] = []
    node = softmax
    while len(node.users) == 1:
        (reader,) = node.users
        nodes.append(reader)
        if calls(reader, _EINSUM):
            second = second_product(reader, node)
            return None if second is None else _Below(steps, nodes, *second)
        if calls(reader, _PRODUCT):
            left, right = _operands(reader)
            if left is node and isinstance(right, Node) and right is not node:
                return _Below(steps, nodes, Operand(right), None)
            return None
        if _first(reader) is not node:
            return None
        if _is_cast(reader):
            steps.append(Step("cast", dtype=dtype_of(reader)))
        elif not (calls(reader, _DROPPED) and _drops_nothing(reader)):
            return None
        node = reader
    return None


def _above(softmax: Node, below: list[Node]) -> _Above | None:
    """From the first product to the softmax.

    :param below: what comes after it. A cast there may look at scores for their dtype.
    """
    steps: list[tuple[Step, Node | None]] = []
    nodes: list[Node] = []
    node, scaled = _first(softmax), False
    while isinstance(node, Node) and _shape(node) == _shape(softmax):
        if sum(reader not in below for reader in node.users) != 1:
            return None
        nodes.append(node)
        if calls(node, _IN_PLACE) and not _writes_scores(node):
            return None
        if calls(node, _PRODUCT | _EINSUM):
            operands = first_product(node) if calls(node, _EINSUM) else _factors(*_operands(node))
            return None if operands is None else _Above(steps, nodes, *operands)
        if calls(node, _SUM_WITH_PRODUCT):
            added = _parts_of_baddbmm(node, scaled)
            return None if added is None else _Above(steps + added[0], nodes, *added[1])
        if _is_cast(node):
            steps.append((Step("cast", dtype=dtype_of(node)), None))
            node = _first(node)
        elif calls(node, _SCALED | _DIVIDED):
            factor = _factor(node)
            if factor is None:
                return None
            steps.append((Step(*factor), None))
            node, scaled = _scores_of(node), True
        else:
            masked = _masked(node)
            # What was added before scores were scaled was scaled with them.
            if masked is None or scaled:
                return None
            node, kind, number, mask = masked
            steps.append((Step(kind, number), mask))
    return None


def _factors(query: Any, transposed: Any) -> tuple[Operand, Operand] | None:
    if not isinstance(query, Node) or not isinstance(transposed, Node):
        return None
    return Operand(query), _transposed(transposed)


def _parts_of_baddbmm(
    node: Node, scaled: bool
) -> tuple[list[tuple[Step, Node | None]], tuple[Operand, Operand]] | None:
    """``beta * mask + alpha * product``; beta 0 means that the first isn't looked at."""
    args: Any = (*node.args, None, None, None)
    added, *factors = args[:3]
    beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))
    operands = _factors(*factors)
    if not isinstance(added, Node) or operands is None:
        return None
    if not isinstance(alpha, int | float) or beta not in (0, 1) or (beta and scaled):
        return None
    masked = [(Step("add", 0.0), added)] if beta else []
    return [*masked, (Step("mul", float(alpha)), None)], operands


def _masked(node: Node) -> tuple[Any, str, float, Node] | None:
    """The scores that a mask is put on, and how."""
    if calls(node, _SUM) and node.kwargs.get("alpha", 1) == 1 and len(node.args) == 2:
        scores, added = _sides(node)
        return (scores, "add", 0.0, added) if isinstance(added, Node) else None
    args: Any = node.args
    if calls(node, _FILLED) and len(args) == 3:
        scores, mask, fill = args
        number = _number(fill)
        if number is None or not isinstance(mask, Node):
            return None
        return scores, "fill", number, mask
    if calls(node, _CHOSEN) and len(args) == 3:
        # As a method it is called on what is taken where the condition holds.
        is_method = node.op == "call_method"
        first, second, other = args
        scores, mask = (first, second) if is_method else (second, first)
        number = _number(other)
        if number is None or not isinstance(mask, Node):
            return None
        return scores, "keep", number, mask
    return None


def _writes_scores(node: Node) -> bool:
    """Whether what is done in place is done to scores, by values of their dtype."""
    read = [dtype_of(one) for one in node.all_input_nodes]
    return _leads_to_product(_first(node)) and set(read) <= {dtype_of(node), torch.bool}


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
        if calls(node, _PRODUCT | _EINSUM):
            return True
        if not calls(node, steps):
            return False
        node = _scores_of(node)
    return False


# --- nodes ----------------------------------------------------------------------------------------


def _is_cast(node: Node) -> bool:
    """Whether a node gives the same values in another dtype, but for roundings."""
    value = value_of(node)
    return calls(node, _CAST) and value is not None and value.dtype in _FLOATS


def _is_narrower(dtype: torch.dtype | None, product: torch.dtype | None) -> bool:
    if dtype not in _FLOATS or product not in _FLOATS:
        return False
    return torch.finfo(dtype).eps > torch.finfo(product).eps


def _first(node: Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("input")


def _operands(node: Node) -> tuple[Any, Any]:
    second = {**node.kwargs}.get("other", node.kwargs.get("mat2"))
    return _first(node), node.args[1] if len(node.args) > 1 else second


def _scores_of(node: Node) -> Any:
    """The factor that isn't a number."""
    first = _first(node)
    return first if isinstance(first, Node) else _operands(node)[1]


def _factor(node: Node) -> tuple[str, float] | None:
    """What scores are multiplied or divided by; None where that isn't a number."""
    first, second = _operands(node)
    if node.kwargs:
        return None
    if calls(node, _DIVIDED):
        return ("div", float(second)) if isinstance(second, int | float) and second else None
    numbers = [one for one in (first, second) if isinstance(one, int | float)]
    return ("mul", float(numbers[0])) if len(numbers) == 1 else None


def _number(value: Any) -> float | None:
    """A number, or the one that a tensor of no dimensions is made of."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if calls(value, {torch.tensor}):
        return _number(argument(value, 0, "data"))
    if calls(value, {torch.full}):
        size = argument(value, 0, "size")
        is_scalar = isinstance(size, tuple | list) and not size
        return _number(argument(value, 1, "fill_value")) if is_scalar else None
    return None


def _drops_nothing(node: Node) -> bool:
    """Whether a dropout leaves all as it is, and makes it anew."""
    names = ("input", "p", "training", "inplace")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    trains = given.get("training", given.get("train", True))
    return not given.get("inplace") and (trains is False or bool(given.get("p", 0.5) == 0))


def _over_the_last(node: Node) -> bool:
    dim = argument(node, 1, "dim")
    value = value_of(node)
    return value is not None and dim in (-1, value.dim() - 1)


def _shape(node: Node) -> Any:
    value = value_of(node)
    return None if value is None else tuple(value.shape)


def _transposed(node: Node) -> Operand:
    """What the second operand of the first product is the transpose of."""
    value = value_of(node)
    last = value.dim() - 1 if value is not None else 0
    swapped = (*range(last - 1), last, last - 1)
    dims: Any = None
    if calls(node, _SWAPPED):
        dims = node.args[1:] or tuple(v for k, v in node.kwargs.items() if k != "input")
    elif calls(node, _PERMUTED):
        rest = node.args[1:] or (node.kwargs.get("dims"),)
        dims = rest[0] if isinstance(rest[0], tuple | list) else rest
    base = _first(node)
    if dims is not None and isinstance(base, Node) and all(isinstance(d, int) for d in dims):
        plain = tuple(d % (last + 1) for d in dims)
        if plain == swapped or (calls(node, _SWAPPED) and set(plain) == {last, last - 1}):
            return Operand(base)
    return Operand(node, swapped)
