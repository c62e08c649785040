"""By which rule each output of a graph is judged: what reaches it decides."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from fuseboard.ops.draws import draws, hides_draws
from fuseboard.profile.judge import lifting
from fuseboard.torch_api.partitioners import state_wrappers

#: How an output is judged.
#:
#: ``close``: floating or complex, no further from float64 than eager's own error allows.
#: ``exact``: integers and booleans that only such values reach: eager's, bit by bit.
#: ``mismatches``: integers and booleans that floats reach: nearly as many right as eager has.
#: ``unjudged``: random numbers or uninitialised memory reach it, or it couldn't be computed.
Rule = Literal["close", "exact", "mismatches", "unjudged"]

#: Ops that look at no element of the argument at this position, only at its shape and dtype.
_VALUES_UNREAD = frozenset(
    {
        *("aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like"),
        *("aten::new_empty", "aten::new_empty_strided", "aten::new_zeros", "aten::new_ones"),
        *("aten::new_full", "aten::rand_like", "aten::randn_like", "aten::randint_like"),
        *("aten::sym_size", "aten::sym_stride", "aten::sym_numel", "aten::sym_storage_offset"),
        *("aten::copy", "aten::fill"),
    }
)

#: Results that mean nothing to the caller: states of generators, scratch memory.
_MEANINGLESS = {
    "aten::_scaled_dot_product_flash_attention": (6, 7, 8),
    "aten::_scaled_dot_product_cudnn_attention": (6, 7, 8),
    "aten::_scaled_dot_product_efficient_attention": (2, 3),
    "aten::_flash_attention_forward": (2, 3, 4),
    "aten::_efficient_attention_forward": (2, 3),
    "aten::mkldnn_rnn_layer": (3,),
    "aten::_cudnn_rnn": (3, 4),
    "aten::cudnn_batch_norm": (3,),
    "aten::miopen_rnn": (3, 4),
}


@dataclass(frozen=True)
class Reached:
    """What reaches a value.

    :ivar floats: it depends on elements of floating or complex tensors.
    :ivar random: it depends on random numbers.
    :ivar memory: it depends on memory that nobody wrote.
    :ivar rounded: its floats aren't just elements of inputs and constants.
    """

    floats: bool = False
    random: bool = False
    memory: bool = False
    rounded: bool = False


_FLOATS, _RANDOM, _MEMORY, _ROUNDED = 1, 2, 4, 8


def reached_by(graph: GraphModule, values: Mapping[Node, Any]) -> dict[Node, Reached]:
    """What reaches each node that is an output.

    :param values: for each node the dtypes of its value: a dtype, a list of them, or None.
    """
    found: dict[Node, int] = {}
    for node in graph.graph.nodes:
        if node.op == "output":
            break
        bits = 0
        for used in _read(node):
            bits |= found[used]
        if _floating(values.get(node)):
            bits |= _FLOATS
            if node.op == "call_function" and not lifting.exact(node.target):
                bits |= _ROUNDED
        else:
            bits &= ~_ROUNDED
        if node.op == "call_function":
            if draws(node) or hides_draws(node, graph) or _keeps_state(node):
                bits |= _RANDOM
            if _uninitialised(node, graph):
                bits |= _MEMORY
        found[node] = bits
    return {node: _reached(found[node]) for node in graph.graph.output_node().all_input_nodes}


def _reached(bits: int) -> Reached:
    return Reached(
        floats=bool(bits & _FLOATS),
        random=bool(bits & _RANDOM),
        memory=bool(bits & _MEMORY),
        rounded=bool(bits & _ROUNDED),
    )


def _read(node: Node) -> Iterable[Node]:
    """The nodes whose elements a node looks at."""
    if _reads_shape_only(node.target):
        shape_only = node.args[0] if node.args else None
        return [used for used in node.all_input_nodes if used is not shape_only]
    return node.all_input_nodes


@functools.cache
def _reads_shape_only(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.name in _VALUES_UNREAD


def _floating(dtypes: Any) -> bool:
    if isinstance(dtypes, list):
        return any(map(_floating, dtypes))
    return isinstance(dtypes, torch.dtype) and (dtypes.is_floating_point or dtypes.is_complex)


def _keeps_state(node: Node) -> bool:
    """Whether a node is one of torch's wrappers that save or set the generator's state."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    return node.target in state_wrappers()


def _uninitialised(node: Node, owner: torch.nn.Module) -> bool:
    target = node.target
    if target is operator.getitem:
        made: Any = node.args[0]
        name = getattr(getattr(made.target, "_schema", None), "name", "")
        return node.args[1] in _MEANINGLESS.get(name, ())
    if isinstance(target, torch._ops.HigherOrderOperator):
        held = [getattr(owner, str(n.target), None) for n in node.all_input_nodes]
        inner = [graph for graph in held if isinstance(graph, GraphModule)]
        return any(_uninitialised(n, graph) for graph in inner for n in graph.graph.nodes)
    return lifting.leaves_memory(target) and not _nothing_in(node)


def _nothing_in(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(
        isinstance(size, int) and size == 0 for size in value.shape
    )


def rule_of(value: Any, reached: Reached | None) -> Rule:
    """The rule for an output whose values mean something.

    :param value: what eager gives.
    :param reached: None for what is no node's value.
    """
    if isinstance(value, torch.Tensor):
        floating = value.is_floating_point() or value.is_complex()
    else:
        floating = isinstance(value, float | complex)
    if floating and reached is not None:
        return "close"
    return "mismatches" if reached is not None and reached.floats else "exact"
