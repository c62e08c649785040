"""What needn't be computed: no-ops, the same thing twice, values that no input decides.

A pass over captured inference graphs, before any backend's decompositions, so that every backend
has it. A model's code calls a dropout that does nothing, asks for each layer's mask anew and slices
whole tensors; captured, a dropout in inference is a copy. In training torch's own joint passes and
its partitioner do the same.

What the caller gets in the end is left as it is: whose memory it is, and that two results are
different tensors, can be told from outside.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fuseboard.contracts import Fusion, GraphKind, Region
from fuseboard.hookspecs import hookimpl
from fuseboard.ops.effects import order_keepers
from fuseboard.ops.forms import are_alike
from fuseboard.ops.views import exposed_nodes
from fuseboard.torch_api.internals import free_symbols, real_tensors

aten = torch.ops.aten

#: A value that no input decides is kept for all calls if it has so few bytes.
MAX_CONSTANT_BYTES = 1 << 20

#: Ops whose result is their first argument, or a copy of it, where both have one form.
_MOVES = frozenset(
    {
        aten.alias,
        aten.clone,
        aten.contiguous,
        aten.expand,
        aten.permute,
        aten.reshape,
        aten.slice,
        aten.squeeze,
        aten.t,
        aten.transpose,
        aten.view,
        aten._to_copy,
        aten._unsafe_view,
    }
)
#: Ops with a number that changes nothing. Not a sum with 0, which makes 0 of -0.
_NEUTRAL: dict[Any, tuple[str, ...]] = {
    aten.mul.Tensor: ("1", "1.0"),
    aten.div.Tensor: ("1", "1.0"),
    aten.sub.Tensor: ("0", "0.0"),
    aten.pow.Tensor_Scalar: ("1", "1.0"),
}


@hookimpl
def fuseboard_fuse(
    graph: GraphModule, kind: GraphKind, region: Region | None
) -> list[Fusion] | None:
    """Offer to take out what needn't be computed in each call."""
    if region is not None or kind != "inference":
        return None
    nodes = _before_writes(graph)
    exposed = exposed_nodes(graph)
    repeatable = _repeatable(nodes)
    duplicates = {
        again: first for again, first in _duplicates(repeatable).items() if again not in exposed
    }
    constants = _constants(nodes, repeatable, exposed, duplicates)
    changed = {*duplicates, *constants}
    no_ops = [node for node in nodes if node not in exposed | changed and _is_no_op(node)]
    return [
        *(_replaced("duplicate", again, first) for again, first in duplicates.items()),
        *(Fusion("constant", (end.name,), partial(_fold, graph, end)) for end in constants),
        *(_replaced("no-op", node, node.args[0]) for node in no_ops),
    ]


def _before_writes(graph: GraphModule) -> list[Node]:
    """The ops of a graph up to the first that writes to an argument."""
    found: list[Node] = []
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            break
        if node.op == "call_function":
            found.append(node)
    return found


def _repeatable(nodes: Sequence[Node]) -> list[Node]:
    """Those that compute the same from the same."""
    ordered = order_keepers(nodes)
    return [node for node in nodes if node not in ordered and not _is_uninitialised(node)]


def _is_uninitialised(node: Node) -> bool:
    return getattr(node.target, "__name__", "").startswith(("empty", "new_empty"))


def _replaced(name: str, node: Node, by: Any) -> Fusion:
    def replace() -> None:
        node.replace_all_uses_with(by)

    return Fusion(name, (node.name,), replace)


# --- no-ops ---------------------------------------------------------------------------------------


def _is_no_op(node: Node) -> bool:
    before = node.args[0] if node.args else None
    if not isinstance(before, Node) or not are_alike(before.meta.get("val"), node.meta.get("val")):
        return False
    if getattr(node.target, "overloadpacket", None) in _MOVES:
        return not node.kwargs.get("pin_memory")
    if node.target in _NEUTRAL:
        # As text: -0.0 isn't 0, and True isn't 1.
        return not node.kwargs and repr(node.args[1]) in _NEUTRAL[node.target]
    return False


# --- the same thing twice -------------------------------------------------------------------------


def _duplicates(nodes: Iterable[Node]) -> dict[Node, Node]:
    """Each op that computes what an earlier one has computed, and that one."""
    first: dict[Any, Node] = {}
    found: dict[Node, Node] = {}
    for node in nodes:
        used = map_arg((node.args, node.kwargs), lambda one: found.get(one, one))
        # As text, 1 isn't 1.0 or True, and -0.0 isn't 0.0.
        known = first.setdefault((node.target, repr(used)), node)
        if known is not node:
            found[node] = known
    return found


# --- what no input decides ------------------------------------------------------------------------


def _constants(
    nodes: Iterable[Node],
    repeatable: Iterable[Node],
    exposed: set[Node],
    duplicates: Mapping[Node, Node],
) -> list[Node]:
    """The ends of computations that have no inputs."""
    known: dict[Node, None] = {}
    for node in repeatable:
        if free_symbols(node.meta.get("val")):
            continue
        is_op = isinstance(node.target, torch._ops.OpOverload)
        if is_op and all(used in known for used in node.all_input_nodes) and _is_fixed(node):
            known[node] = None
    read = {used for node in nodes if node not in known for used in node.all_input_nodes}
    read |= {first for again, first in duplicates.items() if again in read}
    return [
        node
        for node in known
        if node in read
        and node not in exposed
        and node not in duplicates
        and node.all_input_nodes  # what one op makes is made as quickly as it is read
        and isinstance(node.meta.get("val"), torch.Tensor)
        and node.meta["val"].nbytes <= MAX_CONSTANT_BYTES
    ]


def _is_fixed(node: Node) -> bool:
    """Whether a value without inputs is the same under another default dtype or device.

    These are asked for in each call, as the program may change them between two.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    used = [one.meta["val"] for one in node.all_input_nodes]
    if not used and "device" not in node.kwargs:
        return False
    by_default = value.is_floating_point() or value.is_complex()
    given = any(one.is_floating_point() or one.is_complex() for one in used)
    return not by_default or given or "dtype" in node.kwargs


def _fold(graph: GraphModule, end: Node) -> None:
    """Compute a value now, and read it in each call."""
    with real_tensors(), torch.inference_mode(False):
        value = _evaluated(graph, end, {})
    name = next(n for n in map("constant{}".format, itertools.count()) if not hasattr(graph, n))
    graph.register_buffer(name, value)
    with end.graph.inserting_before(end):
        made = end.graph.get_attr(name)
    made.meta = dict(end.meta)
    end.replace_all_uses_with(made)


def _evaluated(graph: GraphModule, node: Node, known: dict[Node, Any]) -> Any:
    if node.op == "get_attr":  # one that was folded before
        return getattr(graph, str(node.target))
    if node not in known:
        args, kwargs = map_arg(
            (node.args, node.kwargs), lambda used: _evaluated(graph, used, known)
        )
        known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]
