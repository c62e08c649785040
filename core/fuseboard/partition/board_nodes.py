"""Nodes that the board keeps to itself instead of giving them to a backend.

Two kinds, both free: arithmetic on symbolic sizes, and views that lead to outputs which share
storage with an input or with another output. Which outputs alias, and that two of them are two
objects, is a promise to the caller that compilers break when they remove views that change
nothing (pytorch#191449); so the runner makes these views itself. Regions that read such a node
get a copy of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.ops.views import view_chain

#: Python and torch functions on ints, floats and bools that graphs with symbolic sizes hold.
_SCALAR_MODULES = {"_operator", "operator", "math", "torch", "builtins", "torch.fx"}
_SIZE_OPS = {"sym_size", "sym_stride", "sym_numel", "sym_storage_offset"}


def board_nodes(graph: GraphModule) -> dict[Node, str]:
    """The nodes that the board runs, each with its reason, in graph order."""
    kept: dict[Node, str] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and _is_size_arithmetic(node, kept):
            kept[node] = "arithmetic on sizes"
    for node in _aliasing_views(graph):
        kept[node] = "a view whose result shares storage with another output or an input"
    return {node: kept[node] for node in graph.graph.nodes if node in kept}


def _is_size_arithmetic(node: Node, kept: dict[Node, str]) -> bool:
    if isinstance(node.meta.get("val"), torch.Tensor | list | tuple | None):
        return False
    if getattr(node.target, "_opname", "") in _SIZE_OPS:
        return all(used.op == "placeholder" for used in node.all_input_nodes)
    target = node.target
    if isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return False
    return getattr(target, "__module__", "") in _SCALAR_MODULES and all(
        not isinstance(used.meta.get("val"), torch.Tensor)
        and (used.op == "placeholder" or used in kept)
        for used in node.all_input_nodes
    )


def _aliasing_views(graph: GraphModule) -> set[Node]:
    """Every view between an output and the storage that it shares."""
    output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
    chains: dict[Node, list[list[Node]]] = {}
    for result in dict.fromkeys(_output_nodes(output)):
        chain = list(view_chain(result))
        chains.setdefault(chain[-1], []).append(chain)
    shared: set[Node] = set()
    for root, group in chains.items():
        if len(group) > 1 or root.op == "placeholder":
            for chain in group:
                shared.update(chain[:-1])
    return shared


def _output_nodes(output: Node) -> list[Node]:
    return [item for item in output.args[0] if isinstance(item, Node)]  # type: ignore[union-attr]


def shared_outputs(results: Sequence[Any]) -> list[frozenset[int]]:
    """For each output, the outputs that may share its storage; -1 stands for an input."""
    roots = [list(view_chain(r))[-1] if isinstance(r, Node) else None for r in results]
    by_root: dict[Node, list[int]] = {}
    for number, root in enumerate(roots):
        if root is not None:
            by_root.setdefault(root, []).append(number)
    answers = []
    for root in roots:
        if root is None:
            answers.append(frozenset[int]())
        else:
            own = frozenset(by_root[root])
            answers.append(own | {-1} if root.op == "placeholder" else own)
    return answers
