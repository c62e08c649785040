"""The table of ops, and what their emitters share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fuseboard_tvm import _scalar
from fuseboard_tvm._values import Point, Value

aten = torch.ops.aten
prims = torch.ops.prims

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}

#: Arguments of a node by name: values for tensors, and everything else as it is.
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Op:
    """How one overload is computed.

    :ivar emit: given the node and its arguments, makes its value, or a list where it has several
        results (None for one that nothing reads).
    :ivar why_not: what speaks against a node, or None.
    :ivar native: TVM's own code; otherwise torch's operator is called from the module.
    """

    emit: Callable[[Node, Arguments], Any]
    why_not: Callable[[Node], str | None] = lambda node: None
    native: bool = True


OPS: dict[Any, Op] = {}


def overload(name: str) -> Any:
    """``aten.add.Tensor`` by its name, or None where this torch hasn't got it."""
    namespace, packet, kind = name.split(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    return getattr(found, kind, None)


def register(names: str, op: Op) -> None:
    """Enter an op under overloads, separated by blanks; ``aten.`` may be left out."""
    for name in names.split():
        full = name if name.startswith("prims.") else f"aten.{name}"
        target = overload(full if full.count(".") > 1 else f"{full}.default")
        if target is not None:
            OPS[target] = op


def emitter(names: str, **keywords: Any) -> Callable[[Any], Any]:
    """Decorate an emitter with the overloads that it is for."""

    def decorate(emit: Any) -> Any:
        register(names, Op(emit, **keywords))
        return emit

    return decorate


def named_arguments(node: Node) -> dict[str, Any]:
    """A node's arguments by name, defaults filled in."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    result: dict[str, Any] = {}
    for place, argument in enumerate(schema):
        if place < len(node.args) and not argument.kwarg_only:
            result[argument.name] = node.args[place]
        elif argument.name in node.kwargs:
            result[argument.name] = node.kwargs[argument.name]
        else:
            result[argument.name] = argument.default_value
    return result


def meta(node: Any) -> Any:
    """The fake value of a node; a number is its own."""
    return node.meta["val"] if isinstance(node, Node) else node


def shape_of(node: Node) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


def dtype_of(node: Node) -> str:
    return DTYPES[node.meta["val"].dtype]


def axes_of(axis: Any, rank: int) -> tuple[int, ...]:
    """Axes as non-negative numbers; None and an empty list mean all."""
    if axis is None or (isinstance(axis, Sequence) and not axis):
        return tuple(range(rank))
    given = axis if isinstance(axis, Sequence) else (axis,)
    return tuple(sorted({one % rank if rank else 0 for one in given})) if rank else ()


def constant(value: Any, dtype: str) -> Value:
    """A number as a value of no axes."""
    return Point((), dtype, (), 0, compute=lambda bind: _scalar.const(value, dtype))


def cast(value: Value, dtype: str) -> Value:
    if value.dtype == dtype:
        return value
    return Point(value.shape, dtype, (value,), 1, compute=lambda bind, x: _scalar.cast(x, dtype))


def point(
    shape: Sequence[int],
    dtype: str,
    compute: Callable[..., Any],
    *inputs: Value,
    cost: int = 1,
    scalar: bool = False,
) -> Value:
    """Element by element."""
    return Point(tuple(shape), dtype, inputs, cost, compute=compute, scalar=scalar)
