"""Ops that torch's own kernels run from within the compiled module.

TVM's wheel has neither BLAS nor oneDNN, and its own matrix products and convolutions are slow
before they are tuned; attention, pooling and what looks up data-dependent places (which must
raise eager's errors) are as good in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fuseboard_tvm import _torch_internals
from fuseboard_tvm._values import Extern, Item, Point, Value, View
from fuseboard_tvm.ops.registry import DTYPES, Arguments, Op, register


def laid_out(value: Value) -> tuple[Value, dict[str, Any] | None]:
    """A stored value and how an operand lies in it; a copy where it can't lie in it.

    :returns: the value to read, and ``size``, ``stride``, ``offset``, or None for all of it.
    """
    steps = []
    base = value
    while isinstance(base, View):
        steps.append(base.strided)
        base = base.inputs[0]
    if not steps:
        return base, None
    with _torch_internals.real_tensors():
        tensor = torch.empty(base.shape, device="meta")
        try:
            for step in reversed(steps):
                if step is None:
                    return copied(value), None
                tensor = step(tensor)
        except (RuntimeError, ValueError):  # torch: sizes and strides don't allow a view
            return copied(value), None
    place = {
        "size": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset(),
    }
    return base, place


def copied(value: Value) -> Value:
    """A value of its own with the same elements."""
    return Point(value.shape, value.dtype, (value,), 1, compute=lambda bind, x: x)


def _encode(argument: Any, tensors: list[Value]) -> Any:
    """An argument as JSON holds it."""
    if isinstance(argument, Value):
        base, place = laid_out(argument)
        if base not in tensors:
            tensors.append(base)
        return {"tensor": tensors.index(base), **(place or {})}
    if isinstance(argument, torch.dtype):
        return {"dtype": str(argument).removeprefix("torch.")}
    if isinstance(argument, list | tuple):
        return [_encode(one, tensors) for one in argument]
    if argument is None or isinstance(argument, bool | int | float | str):
        return argument
    raise TypeError(f"{argument!r} isn't passed to torch's operators")


def _results(node: Node) -> tuple[tuple[tuple[int, ...], str] | None, ...]:
    own = node.meta["val"]
    many = own if isinstance(own, list | tuple) else (own,)
    return tuple(
        (tuple(int(size) for size in one.shape), DTYPES[one.dtype])
        if isinstance(one, torch.Tensor)
        else None
        for one in many
    )


def _call(node: Node, a: Arguments, out: bool) -> Any:
    target: Any = node.target
    name = f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"
    if out:
        name = f"{name.rpartition('.')[0]}.out"
    tensors: list[Value] = []
    args, kwargs = [], {}
    for argument in target._schema.arguments:
        encoded = _encode(a[argument.name], tensors)
        if argument.kwarg_only:
            kwargs[argument.name] = encoded
        else:
            args.append(encoded)
    results = _results(node)
    spec = {"op": name, "args": args, "kwargs": kwargs, "out": out}
    extern = Extern((), "none", tuple(tensors), spec=spec, results=results)
    items = [
        Item(*result, (extern,), number=place) if result is not None else None
        for place, result in enumerate(results)
    ]
    return items if isinstance(node.meta["val"], list | tuple) else items[0]


def _register(names: str, out: bool = False) -> None:
    register(names, Op(lambda node, a: _call(node, a, out), native=False))


_register("mm addmm bmm baddbmm", out=True)
_register("addmv mv dot convolution convolution_backward")
_register("_scaled_dot_product_flash_attention_for_cpu")
_register("_scaled_dot_product_flash_attention_for_cpu_backward")
_register("max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward")
_register("_adaptive_avg_pool2d _adaptive_avg_pool2d_backward")
_register("embedding embedding_dense_backward index.Tensor index_select gather take")
_register("index_put scatter.src scatter.value scatter_add scatter_reduce.two index_add index_copy")
_register("_unsafe_index.Tensor _unsafe_index_put cumsum cumprod sort sort.stable topk")
_register("upsample_nearest2d upsample_nearest2d_backward")
_register("upsample_bilinear2d upsample_bilinear2d_backward")

__all__ = ["copied", "laid_out"]
