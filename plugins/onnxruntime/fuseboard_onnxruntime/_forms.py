"""Which ops a model may be written from, so that nothing is claimed that can't be converted.

An op that is decomposed is claimed only if what it falls into, for its own dtypes, sizes and
strides, has a form here. The conversion holds the whole region against the same list: what torch's
ONNX library has beyond it isn't proven, and some of it reads memory as if it were row-major.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

import fuseboard
from fuseboard_onnxruntime import _decompositions, _torch_internals
from fuseboard_onnxruntime._ops import overloads, table, why_not
from fuseboard_onnxruntime._translations import translations

aten: Any = torch.ops.aten

#: Ops that only decompositions bring, and sizes; the cases of what brings them prove them.
_PARTS = (
    *overloads(aten, "scatter.value select_scatter slice_scatter sym_size.int"),
    *overloads(torch.ops.prims, "broadcast_in_dim div squeeze sum var"),
)
#: Parts that are right within these ops although they are declined by themselves: NaN, which the
#: maximum ignores, comes back through the exponentials of all elements.
_RIGHT_WITHIN = {
    aten.amax.default: frozenset(
        {
            aten.logsumexp.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
        }
    )
}


@cache
def forms() -> frozenset[Any]:
    """Ops that are translated as they are."""
    return frozenset({*table(), *_PARTS, *translations()} - _decompositions.table().keys())


def why_no_form(node: Node) -> str | None:
    """Why a node of a decomposed graph isn't translated, or None."""
    if node.op != "call_function" or node.target in forms():
        return None
    return f"{node.target} has no ONNX form that is proven"


def why_not_claimed(node: Node) -> str | None:
    """The reason to decline a node of a captured graph, or None: its own, or that of a part."""
    if getattr(node.target, "namespace", "") == "aten" and fuseboard.widens(node):
        # Its sessions compute once what depends on weights alone.
        return "ONNX Runtime would keep a quantised weight as floats"
    reason = why_not(node)
    if reason is not None or node.target not in _decompositions.table():
        return reason
    read = {user.args[1] for user in node.users if user.target is operator.getitem}
    items = tuple(sorted(read)) if isinstance(node.meta["val"], list | tuple) else None
    return _why_not_parts(node.target, _frozen(node.args), _frozen(node.kwargs), items)


# --- an op by itself ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tensor:
    """What a decomposition may depend on of a tensor; symbolic sizes as they are in the example."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _frozen(arg: Any) -> Any:
    """Arguments that tell equal calls from others."""
    if isinstance(arg, Node):
        return _frozen(arg.meta["val"])
    if isinstance(arg, torch.Tensor):
        sizes = (tuple(map(_torch_internals.size_hint, n)) for n in (arg.shape, arg.stride()))
        return _Tensor(arg.dtype, *sizes)
    if isinstance(arg, torch.SymInt):
        return _torch_internals.size_hint(arg)
    if isinstance(arg, list | tuple):
        return tuple(map(_frozen, arg))
    if isinstance(arg, dict):
        return tuple((key, _frozen(value)) for key, value in arg.items())
    return arg


@lru_cache(maxsize=4096)
def _why_not_parts(target: Any, args: Any, kwargs: Any, items: Any) -> str | None:
    """
    :param items: which of its results are read, as a tuple; None where it has one.
    """
    try:
        with fuseboard.real_tensors():
            parts = _decompositions.decompose(_alone(target, args, dict(kwargs), items))
    except Exception as error:  # torch's decompositions raise whatever their checks do
        return f"its decomposition isn't possible: {type(error).__name__}: {error}"
    parts.graph.eliminate_dead_code()
    for part in parts.graph.nodes:
        reason = why_no_form(part)
        if part.target in table() and target not in _RIGHT_WITHIN.get(part.target, ()):
            reason = reason or why_not(part)
        if reason is not None:
            return f"it decomposes into {part.target}: {reason}"
    return None


def _alone(target: Any, args: Any, kwargs: Any, items: tuple[int, ...] | None) -> GraphModule:
    """A graph of nothing but this op."""
    graph = Graph()
    mode = _torch_internals.fake_mode()

    def thawed(arg: Any) -> Any:
        if isinstance(arg, _Tensor):
            node = graph.placeholder(f"x{len(graph.nodes)}")
            with mode:
                node.meta["val"] = torch.empty_strided(
                    arg.shape, arg.strides, dtype=arg.dtype, device="cpu"
                )
            return node
        return [thawed(item) for item in arg] if isinstance(arg, tuple) else arg

    given = tuple(map(thawed, args))
    node = graph.call_function(target, given, {key: thawed(arg) for key, arg in kwargs.items()})
    results = [node]
    if items is not None:
        results = [graph.call_function(operator.getitem, (node, item)) for item in items]
    graph.output(tuple(results))
    return GraphModule(torch.nn.Module(), graph)
