"""ATen ops that are several steps in one, such as softmax, norms, activations and their gradients.

Each is built from the steps of torch's own decomposition. Half types are computed in float32 from
inputs to result, as ATen's CUDA kernels do it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph, GraphModule, Node

import fuseboard
from fuseboard_triton import _reductions as _reductions  # registers what it builds
from fuseboard_triton import _shapes as _shapes  # as this does
from fuseboard_triton import _torch_internals
from fuseboard_triton._build import buffer, build_op, owned, shape_of
from fuseboard_triton._elementwise import as_dtype
from fuseboard_triton._ir import Unsupported, Value

_NAMES = """
sigmoid_backward.default silu.default silu_backward.default tanh_backward.default
threshold_backward.default gelu.default gelu_backward.default leaky_relu.default hardtanh.default
hardsigmoid.default hardswish.default elu.default softplus.default addcmul.default addcdiv.default
lerp.Scalar _softmax.default _softmax_backward_data.default _log_softmax.default
_log_softmax_backward_data.default native_layer_norm.default native_layer_norm_backward.default
_fused_rms_norm.default _fused_rms_norm_backward.default mse_loss.default mse_loss_backward.default
masked_fill.Scalar masked_fill.Tensor rsub.Scalar rsub.Tensor clamp_min.default clamp_max.default
floor_divide.default std.correction tril.default triu.default
"""
#: What steps may be cast with: half types to float32 and back.
_CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)
STEPS = _torch_internals.decomposition_table(tuple(_NAMES.split()))


def build(node: Node, values: Callable[[Node], Any]) -> Any:
    """What a node computes: a value, or a tuple of them; None for a result that it leaves out.

    :param values: what an input node stands for: a value, a tuple, or a number's expression.
    :raises Unsupported: kernels don't compute this, or one of its steps.
    """
    if node.target not in STEPS:
        return build_op(node, values)
    steps = _steps_of(node)
    placeholders = steps.find_nodes(op="placeholder")
    known = dict(zip(placeholders, map(values, node.all_input_nodes), strict=True))
    for step in steps.nodes:
        if step.op == "call_function":
            known[step] = _step(step, known.__getitem__)
        elif step.op == "get_attr":
            raise Unsupported(f"{node.target} has a step that reads a constant tensor")
    results = (known[result] for result in steps.output_node().args[0])
    metas = node.meta["val"]
    if not isinstance(metas, tuple | list):
        return owned(next(results), metas, node)
    return tuple(None if meta is None else owned(next(results), meta, node) for meta in metas)


def _steps_of(node: Node) -> Graph:
    """The steps of a node, traced once for the nodes of a graph that are alike."""
    inputs = node.all_input_nodes

    def described(used: Node) -> str:
        meta = used.meta["val"]
        if not isinstance(meta, torch.Tensor):
            return f"{inputs.index(used)}: {meta}"
        return f"{inputs.index(used)}: {meta.dtype} {shape_of(meta)} {meta.stride()} {meta.device}"

    known = _traced.setdefault(node.graph, {})
    kind = f"{node.target} {torch.fx.map_arg((node.args, node.kwargs), described)}"
    if kind not in known:
        known[kind] = fuseboard.decompose(_alone(node), STEPS).graph
    return known[kind]


_traced: WeakKeyDictionary[Graph, dict[str, Graph]] = WeakKeyDictionary()


def _step(step: Node, values: Callable[[Node], Any]) -> Any:
    meta = step.meta["val"]
    if isinstance(meta, torch.SymInt):
        return Value("symbol", torch.int64, (), param=meta.node.expr)
    read = [values(used) for used in step.all_input_nodes]
    if step.target in _CASTS and read[0].dtype.is_floating_point:
        return as_dtype(read[0], meta.dtype)  # it isn't the user's cast: nothing is rounded
    built = build_op(step, values)
    for value in built if isinstance(built, tuple) else (built,):
        if value is not None and value not in read:
            value.meta = None  # the results of steps have no place in memory
    return built


def _alone(node: Node) -> GraphModule:
    """A graph of this node, which returns its results as a flat tuple."""
    graph = Graph()
    inputs = {used: graph.placeholder(used.name) for used in node.all_input_nodes}
    for used, placeholder in inputs.items():
        placeholder.meta["val"] = used.meta["val"]
    copy = graph.node_copy(node, inputs.__getitem__)
    metas = node.meta["val"]
    results = (copy,)
    if isinstance(metas, tuple | list):
        places = [place for place, meta in enumerate(metas) if meta is not None]
        results = tuple(graph.call_function(operator.getitem, (copy, place)) for place in places)
        for place, result in zip(places, results, strict=True):
            result.meta["val"] = metas[place]
    graph.output(results)
    return GraphModule(torch.nn.Module(), graph)


def why_unbuildable(node: Node) -> str | None:
    """Why a node can't be built; None if it can."""

    def stand_in(used: Node) -> Any:
        meta = used.meta.get("val")
        if isinstance(meta, torch.Tensor):
            return buffer(meta)
        if isinstance(meta, torch.SymInt):
            return Value("symbol", torch.int64, (), param=meta.node.expr)
        if isinstance(meta, tuple | list):
            return tuple(buffer(m) if isinstance(m, torch.Tensor) else None for m in meta)
        raise Unsupported(f"an argument of type {type(meta).__name__} isn't supported")

    metas = node.meta.get("val")
    for meta in metas if isinstance(metas, tuple | list) else [metas]:
        if _torch_internals.has_unbacked(meta):
            return "its size is known only from data"
    try:
        build(node, stand_in)
    except Unsupported as reason:
        return str(reason)
    return None
