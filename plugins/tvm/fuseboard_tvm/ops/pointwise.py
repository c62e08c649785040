"""Element by element: selection, conversions and copies, tensors made of numbers."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from fuseboard_tvm import _scalar as s
from fuseboard_tvm._values import Value
from fuseboard_tvm.ops.promotion import as_value, common_dtype
from fuseboard_tvm.ops.registry import (
    Arguments,
    Op,
    cast,
    dtype_of,
    emitter,
    named_arguments,
    point,
    register,
    shape_of,
)

# --- of three ------------------------------------------------------------------------------------


def _where(node: Node, a: Arguments) -> Value:
    dtype = common_dtype(node, ["self", "other"], "NO_OPMATH")
    condition = cast(a["condition"], "bool")
    sides = as_value(a["self"], dtype), as_value(a["other"], dtype)
    result = dtype_of(node)

    def element(bind: Any, condition: Any, x: Any, y: Any) -> Any:
        return s.cast(s.select(condition, x, y), result)

    return point(shape_of(node), result, element, condition, *sides)


register("where.self", Op(_where))


def _clamp(node: Node, a: Arguments) -> Value:
    names = ["self", *(name for name in ("min", "max") if a.get(name) is not None)]
    dtype = common_dtype(node, names, "DEFAULT")
    values = [as_value(a[name], dtype) for name in names]
    result = dtype_of(node)

    def element(bind: Any, x: Any, *bounds: Any) -> Any:
        limits = dict(zip(names[1:], bounds, strict=True))
        if "min" in limits:
            x = bind(s.maximum(x, limits["min"]))
        if "max" in limits:
            x = bind(s.minimum(x, limits["max"]))
        return s.cast(x, result)

    return point(shape_of(node), result, element, *values, cost=3)


register("clamp clamp.Tensor clamp_min clamp_max", Op(_clamp))


# --- conversions and copies ----------------------------------------------------------------------


@emitter("clone detach alias lift_fresh_copy _to_copy")
def _copy(node: Node, a: Arguments) -> Value:
    """The same values, in the dtype of the result."""
    return cast(a["self"], dtype_of(node))


@emitter("prims.convert_element_type")
def _convert(node: Node, a: Arguments) -> Value:
    return cast(a["a"], dtype_of(node))


# --- what is made of numbers ---------------------------------------------------------------------


def _filled(node: Node, value: Any) -> Value:
    dtype = dtype_of(node)
    return point(shape_of(node), dtype, lambda bind: s.const(value, dtype), cost=0)


def _number_only(node: Node) -> str | None:
    given = named_arguments(node)
    value = given.get("fill_value", given.get("s", given.get("value", 0)))
    if isinstance(value, Node):
        return "it is filled with a number that only a call knows"
    return None


register(
    "full full_like new_full scalar_tensor",
    Op(
        lambda node, a: _filled(node, a["fill_value"] if "fill_value" in a else a["s"]),
        _number_only,
    ),
)
# What is empty may hold anything.
_EMPTY = "empty.memory_format empty_like new_empty"
register(f"zeros zeros_like new_zeros {_EMPTY}", Op(lambda node, a: _filled(node, 0)))
register("fill.Scalar", Op(lambda node, a: _filled(node, a["value"]), _number_only))
register("ones ones_like new_ones", Op(lambda node, a: _filled(node, 1)))
