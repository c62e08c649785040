"""Dtypes: ONNX numbers for them, and torch's promotion made explicit."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

import fuseboard

aten = torch.ops.aten

#: ``onnx.TensorProto.DataType``, written down so that a model is called without importing onnx.
_ONNX_TYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
}
TORCH_TYPES = {number: dtype for dtype, number in _ONNX_TYPES.items()}


SMALL_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16})


def is_supported(dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype may be in a region."""
    return dtype in _ONNX_TYPES


def onnx_type(dtype: torch.dtype) -> int:
    """:raises LoweringError: a dtype that isn't proven here."""
    try:
        return _ONNX_TYPES[dtype]
    except KeyError:
        raise fuseboard.LoweringError(f"dtype {dtype} isn't supported") from None


#: Ops whose tensors are brought to the dtype of the result, and their scalars with them.
TO_RESULT = frozenset(
    {
        aten.add.Tensor,
        aten.add.Scalar,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.maximum.default,
        aten.minimum.default,
        aten.pow.Tensor_Tensor,
        aten.pow.Tensor_Scalar,
        aten.remainder.Tensor,
        aten.remainder.Scalar,
        aten.clamp.default,
        aten.clamp_min.default,
        aten.clamp_max.default,
        aten.fmod.Tensor,
        aten.floor_divide.default,
        aten.rsub.Scalar,
        aten.cat.default,
        aten.stack.default,
        aten.where.self,
        aten.bitwise_and.Tensor,
        aten.bitwise_or.Tensor,
        aten.bitwise_xor.Tensor,
        aten.exp.default,
        aten.exp2.default,
        aten.expm1.default,
        aten.log.default,
        aten.log1p.default,
        aten.log10.default,
        aten.log2.default,
        aten.sqrt.default,
        aten.rsqrt.default,
        aten.sin.default,
        aten.cos.default,
        aten.tan.default,
        aten.asin.default,
        aten.acos.default,
        aten.atan.default,
        aten.sinh.default,
        aten.cosh.default,
        aten.asinh.default,
        aten.acosh.default,
        aten.atanh.default,
        aten.tanh.default,
        aten.sigmoid.default,
        aten.erf.default,
        aten.reciprocal.default,
        aten.lerp.Scalar,
        aten.lerp.Tensor,
        aten.addcmul.default,
        aten.addcdiv.default,
        aten.atan2.default,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.cumsum.default,
        aten.prod.default,
        aten.prod.dim_int,
        torch.ops.prims.div.default,
    }
)
#: Comparisons: their tensors are brought to their common dtype.
TO_COMMON = frozenset(
    getattr(getattr(aten, name), overload)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for overload in ("Tensor", "Scalar")
)


#: Ranges: their numbers are of the result's dtype in torch, and of one dtype in ONNX.
RANGES = frozenset({aten.arange.default, aten.arange.start, aten.arange.start_step})


def promote(graph: GraphModule) -> None:
    """Put casts where torch promotes in silence; ONNX wants equal dtypes."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in TO_RESULT:
            value = node.meta["val"]
            _cast_inputs(graph, node, value.dtype, skip_first=node.target is aten.where.self)
        elif node.target in RANGES:
            node.update_kwarg("dtype", node.meta["val"].dtype)
        elif node.target in TO_COMMON:
            _cast_inputs(graph, node, common_dtype(node))


def common_dtype(node: Node) -> torch.dtype:
    """The dtype in which a binary op computes."""
    left, right = (_example(arg) for arg in node.args[:2])
    return torch.result_type(left, right)


def _example(arg: Any) -> Any:
    value = arg.meta["val"] if isinstance(arg, Node) else arg
    if isinstance(value, torch.SymInt):
        return 1
    if isinstance(value, torch.Tensor):
        return torch.empty([0] * min(value.dim(), 1) or [], dtype=value.dtype, device="meta")
    return value


def _cast_inputs(
    graph: GraphModule, node: Node, dtype: torch.dtype, skip_first: bool = False
) -> None:
    casts: dict[Node, Node] = {}

    def cast(arg: Any) -> Any:
        if isinstance(arg, list | tuple):
            return type(arg)(map(cast, arg))
        value = arg.meta.get("val") if isinstance(arg, Node) else None
        if isinstance(value, torch.SymInt | torch.SymFloat):  # a 0-d tensor in the model
            wide = torch.int64 if isinstance(value, torch.SymInt) else torch.float64
            value = node.meta["val"].new_empty((), dtype=wide)
        if not isinstance(value, torch.Tensor) or value.dtype == dtype:
            return arg
        if arg not in casts:
            with graph.graph.inserting_before(node):
                new = graph.graph.call_function(aten._to_copy.default, (arg,), {"dtype": dtype})
            new.meta["val"] = value.to(dtype)
            casts[arg] = new
        return casts[arg]

    args = tuple(node.args)
    kept = args[:1] if skip_first else ()
    node.args = (*kept, *map(cast, args[len(kept) :]))
