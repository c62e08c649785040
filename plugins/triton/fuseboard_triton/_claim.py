"""Which nodes this backend takes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fuseboard
from fuseboard_triton import _torch_internals
from fuseboard_triton._composites import why_unbuildable
from fuseboard_triton._match import matches
from fuseboard_triton._options import Options

#: Namespaces whose ops may be run on the host between kernels.
NAMESPACES = ("aten", "prims")


def claim(graph: GraphModule, options: Options | None) -> list[fuseboard.Claim | fuseboard.Decline]:
    """What kernels compute, with the views between; and the same with what can be carried along.

    Matrix products and other ops that aren't computed here are carried along, run as in eager, so
    that a graph isn't cut at each. Where a later backend runs them better, it is the first claim
    that is left.
    """
    found = matches(graph) if options is None or options.written_kernels else []
    written = {node for match in found for node in match.found.nodes}

    def is_native(node: Node) -> bool:
        return node in written or is_computed(node)

    carried = fuseboard.claim_nodes(graph, why_not_carried, native=is_native)
    if not any(isinstance(answer, fuseboard.Claim) and answer.native for answer in carried):
        return fuseboard.claim_nodes(graph, why_not)
    own = fuseboard.claim_nodes(graph, why_not, native=is_native)
    wholes = [match.found.nodes for match in found if match.only]
    names = [frozenset(node.name for node in nodes) for nodes in wholes]
    whole = [fuseboard.Claim(nodes=n, native=n, together=True) for n in names]
    return [*whole, *(a for a in own if isinstance(a, fuseboard.Claim)), *carried]


def is_computed(node: Node) -> bool:
    """Whether a kernel computes a node."""
    return not is_view(node) and why_not(node) is None


def why_not(node: Node) -> str | None:
    """Why no kernel computes a node; None if one does, or if it is only a view."""
    target: Any = node.target
    if target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, Node)
        return why_not(source) if source.op == "call_function" else "an item of an input"
    if is_view(node):
        return None
    if not isinstance(target, torch._ops.OpOverload):
        return f"{getattr(target, '__name__', target)} has no kernel here"
    return why_unbuildable(node)


def why_not_carried(node: Node) -> str | None:
    """Why a node can't even be run on the host between kernels; None if it can."""
    target: Any = node.target
    if target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, Node)
        return why_not_carried(source) if source.op == "call_function" else why_not(node)
    reason = why_not(node)
    if reason is None:
        return None
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in NAMESPACES:
        return reason
    if torch.Tag.nondeterministic_seeded in target.tags and not _without_dropout(node):
        return f"{target} draws random numbers"
    if target._schema.is_mutable:
        return f"{target} writes to its inputs"
    metas = node.meta.get("val")
    values = [*(metas if isinstance(metas, list | tuple) else [metas])]
    values += [used.meta.get("val") for used in node.all_input_nodes]
    if any(_torch_internals.has_unbacked(value) for value in values):
        return "its size is known only from data"
    return None


def _without_dropout(node: Node) -> bool:
    """Whether an op that may draw random numbers, for a dropout, doesn't."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return isinstance(given, float | int) and given == 0


def is_view(node: Node) -> bool:
    """Whether a node only looks at memory: run on the host where no kernel can see through it."""
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    return isinstance(target, torch._ops.OpOverload) and bool(target.is_view)
