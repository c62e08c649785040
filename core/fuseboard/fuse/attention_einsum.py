"""Attention's two products written as ``torch.einsum``: which letters are which dimensions."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from fuseboard.fuse.reading import Operand


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


def first_product(node: Node) -> tuple[Operand, Operand] | None:
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


def second_product(node: Node, probabilities: Node) -> tuple[Operand, tuple[int, ...]] | None:
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
