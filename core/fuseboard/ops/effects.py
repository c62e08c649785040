"""Which ops do more than compute: draws, writes, collectives, checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

#: Namespaces of ops that talk to other ranks of a job.
_OF_RANKS = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem"}
)


def is_collective(target: Any) -> bool:
    """Whether an op, or all of its overloads, talks to other ranks."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in _OF_RANKS
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0] in _OF_RANKS
    return False


def keeps_order(node: Node) -> bool:
    """Whether a node draws random numbers or has effects, so that its order matters.

    Collectives are among them: ranks that came to them in different orders would wait for ever.
    """
    target = node.target
    if is_collective(target):
        return True
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags or bool(node.is_impure())
    return isinstance(target, torch._ops.HigherOrderOperator)


def order_keepers(nodes: Iterable[Node]) -> set[Node]:
    """Those of the nodes that :func:`keeps_order` holds for; torch is asked once for each op."""
    known: dict[int, bool] = {}  # by identity: hashing an op costs as much as all else here
    kept: set[Node] = set()
    for node in nodes:
        keeps = known.get(id(node.target))
        if keeps is None:
            keeps = known[id(node.target)] = keeps_order(node)
        if keeps:
            kept.add(node)
    return kept


def drop_unread(graph: Graph) -> None:
    """Erase nodes that nobody reads and that needn't run."""
    kept = order_keepers(node for node in graph.nodes if node.op == "call_function")
    graph.eliminate_dead_code(
        is_impure_node=lambda node: node in kept or node.op in {"placeholder", "output"}
    )


def has_effects(node: Node) -> bool:
    """Whether running a node twice can be told from running it once: more than a random draw.

    Ordered effects (``torch.ops.higher_order.with_effects``), collectives, and ops that torch
    keeps although nobody reads them, such as writes; checks of values aside.
    """
    target = node.target
    if target is torch.ops.higher_order.with_effects:
        return not only_raises(node)
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if is_collective(target):
        return True
    if target._opname.startswith(("_assert", "sym_constrain")):
        return False
    return bool(node.is_impure()) and torch.Tag.nondeterministic_seeded not in target.tags


def only_raises(node: Node) -> bool:
    """Whether an ordered effect is nothing but a check, which may be made again.

    ``torch/_higher_order_ops/effects.py`` of 2.13 orders the check behind ``linalg.inv``,
    ``cholesky``, ``solve`` and their like among the effects, so that it isn't dropped.
    """
    return (
        node.target is torch.ops.higher_order.with_effects
        and len(node.args) > 1
        and node.args[1] is torch.ops.aten._linalg_check_errors.default
    )
