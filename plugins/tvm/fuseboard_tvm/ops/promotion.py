"""Ops that promote their operands to one dtype and compute each element in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fuseboard_tvm import _scalar as s
from fuseboard_tvm import _torch_internals
from fuseboard_tvm._values import Value
from fuseboard_tvm.ops.registry import (
    DTYPES,
    Arguments,
    Op,
    cast,
    constant,
    dtype_of,
    meta,
    named_arguments,
    point,
    register,
    shape_of,
)

Compute = Callable[..., Any]


def _operands(node: Node, names: list[str]) -> list[Any]:
    given = named_arguments(node)
    return [given[name] for name in names if given[name] is not None]


def common_dtype(node: Node, names: list[str], kind: str) -> str:
    """What an op computes in, by the promotion of these arguments."""
    found = [meta(one) for one in _operands(node, names)]
    return DTYPES[_torch_internals.promoted(found, kind)]


def promoting(
    names: str,
    operands: str,
    compute: Compute,
    kind: str = "DEFAULT",
    cost: int = 1,
    why_not: Callable[[Node], str | None] | None = None,
    in_library: str = "",
) -> None:
    """Ops that promote their operands to one dtype and compute in it.

    :param in_library: the dtypes for which ``compute`` calls the C library.
    """
    wanted = operands.split()

    def emit(node: Node, a: Arguments) -> Value:
        dtype = common_dtype(node, wanted, kind)
        values = [as_value(a[name], dtype) for name in wanted]
        result = dtype_of(node)

        def element(bind: Any, *elements: Any) -> Any:
            return s.cast(compute(bind, *elements), result)

        scalar = dtype in in_library.split()
        return point(shape_of(node), result, element, *values, cost=cost, scalar=scalar)

    def complain(node: Node) -> str | None:
        try:
            common_dtype(node, wanted, kind)
        except KeyError as error:
            return f"it computes in {error.args[0]}"
        return why_not(node) if why_not is not None else None

    register(names, Op(emit, complain))


def as_value(value: Any, dtype: str) -> Value:
    """A value, or a number as one, in a dtype."""
    return cast(value, dtype) if isinstance(value, Value) else constant(value, dtype)


def float_only(node: Node) -> str | None:
    """For ops whose integer form isn't written."""
    if any(
        isinstance(meta(one), torch.Tensor) and not meta(one).is_floating_point()
        for one in node.all_input_nodes
    ):
        return f"{node.target} of integers isn't supported"
    return None


def simple(compute: Callable[..., Any]) -> Compute:
    """For what stores nothing in between."""
    return lambda bind, *elements: compute(*elements)


def library(name: str) -> Compute:
    """A function of the C library."""
    return lambda bind, *elements: s.libm(name, *elements)


FLOATS, DOUBLE = "float32 float64", "float64"
