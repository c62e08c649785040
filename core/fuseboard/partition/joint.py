"""The joint split: which values the forward saves and which the backward computes again.

torch's partitioners do the splitting. What is decided here goes to them as tags of nodes
(``node.meta["recompute"]``, as ``torch.utils.checkpoint`` sets them); tags of the user's stand.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fuseboard import torch_internals
from fuseboard.contracts import JointPolicy, Knapsack
from fuseboard.partition.marks import MEMORY_BUDGET, mark_of

SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE

#: Arguments that switch an op's randomness off, and the value that does.
_SWITCHES = {"dropout_p": 0, "p": 0, "dropout": 0, "train": False, "training": False}


def split_joint(
    joint: GraphModule,
    inputs: Sequence[Any],
    num_fwd_outputs: int,
    static_inputs: Sequence[int],
    memory_budget: float,
    policy: JointPolicy,
    knapsack: Knapsack,
    keywords: dict[str, Any],
) -> tuple[GraphModule, GraphModule]:
    """Split by policy, through ``torch/_functorch/partitioners.py``. ``joint`` is changed.

    ``min_cut``: rematerialisation within the budget; a budget of 0 is ``recompute_all``.
    ``default``: all that the backward reads is saved. ``recompute_all``: the backward computes
    all that it can from the forward's inputs; random draws are replayed from their saved state.

    Under each, checkpointed modules (``torch.utils.checkpoint``) are recomputed as the user asked,
    and code in ``with fuseboard.memory_budget(value)`` is treated as that budget for the whole
    graph would treat it.
    """

    forward = _forward_nodes(joint)
    kept = _keep_what_cannot_repeat(joint, forward)
    whole = {"default": None, "recompute_all": 0.0, "min_cut": memory_budget}[policy]

    def min_cut(graph: GraphModule, budget: float) -> tuple[GraphModule, GraphModule]:
        return torch_internals.min_cut_partition(
            graph, inputs, num_fwd_outputs, static_inputs, budget, knapsack, keywords
        )

    shares = _shares(forward, whole)
    # Every split of a copy comes before the first tag: it shows what its budget alone would choose.
    splits = {budget: min_cut(_copy(joint), budget) for budget in shares if budget > 0}
    for budget, nodes in shares.items():
        if budget > 0:
            _follow(nodes, *splits[budget])
        else:
            _recompute(nodes, kept)
    if whole is None:
        return torch_internals.default_partition(
            joint, inputs, num_fwd_outputs, static_inputs, keywords
        )
    return min_cut(joint, 1.0 if shares else whole)


def _shares(forward: Sequence[Node], whole: float | None) -> dict[float, list[Node]]:
    """The nodes to tag, by the budget that decides about them.

    None if one budget above 0 serves the whole graph: no tags are needed then.
    """
    shares: dict[float, list[Node]] = {}
    for node in forward:
        own = mark_of(node, MEMORY_BUDGET)
        budget = whole if own is None else own
        if budget is not None:
            shares.setdefault(budget, []).append(node)
    if set(shares) <= {whole} and whole != 0:
        return {}
    if whole == 1:
        del shares[1.0]  # what is left untagged is split by that very budget
    return shares


def _copy(graph: GraphModule) -> GraphModule:
    new = Graph()
    new.output(new.graph_copy(graph.graph, {}))
    return torch_internals.graph_module(graph, new, type(graph).__name__)


def _forward_nodes(joint: GraphModule) -> list[Node]:
    """The computing nodes that no gradient of an output leads to."""
    late: set[Node] = set()
    early = []
    for node in joint.graph.nodes:
        tag = node.meta.get("partitioner_tag")
        if node.op == "placeholder":
            if "tangents" in str(node.target):
                late.add(node)
        elif tag == "must_be_in_backward" or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
        elif node.op == "call_function":
            early.append(node)
    return early


# --- what a second run would change ---------------------------------------------------------------


def _keep_what_cannot_repeat(joint: GraphModule, forward: Iterable[Node]) -> set[Node]:
    """Tag what would give something else if it ran again, and say which nodes that are.

    Within a budget below 1 torch recomputes random ops other than dropout, ``rand_like`` and
    ``randn_like``, with other numbers (``OpTypes.is_random`` in 2.13). Those that the user
    checkpoints it replays, if they aren't inside of a higher-order op.
    """
    kept = set()
    for node in forward:
        wanted = node.meta.get("recompute")
        checkpointed = wanted in (RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
        if _hides_draws(node, joint) or (not checkpointed and not _repeatable(node)):
            node.meta["recompute"] = SAVE
            kept.add(node)
    return kept


def _repeatable(node: Node) -> bool:
    return not (draws(node) or _has_effects(node) or node.meta.get("unbacked_bindings"))


def draws(node: Node) -> bool:
    """Whether an op draws random numbers with the arguments that it has."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False))
    defaults = {a.name: a.default_value for a in target._schema.arguments}
    values = {**defaults, **given, **node.kwargs}
    return not any(
        name in values and values[name] is not None and values[name] == off
        for name, off in _SWITCHES.items()
    )


def _hides_draws(node: Node, owner: torch.nn.Module) -> bool:
    """Whether a higher-order op's own graphs draw random numbers."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    for used in node.all_input_nodes:
        inner = getattr(owner, str(used.target), None) if used.op == "get_attr" else None
        if isinstance(inner, GraphModule) and any(
            draws(n) or _hides_draws(n, inner) for n in inner.graph.nodes
        ):
            return True
    return False


def _has_effects(node: Node) -> bool:
    """Collectives, ops that write, ops that are ordered by tokens."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "_c10d_functional" or target._schema.is_mutable
    return getattr(target, "__name__", "") == "with_effects"


# --- tags -----------------------------------------------------------------------------------------


def _recompute(nodes: Iterable[Node], kept: Collection[Node]) -> None:
    """Tag all that can be computed again. Draws are replayed from their state: torch sees to it."""
    for node in nodes:
        saved = node.meta.get("recompute") is SAVE
        replayed = node in kept and draws(node)
        if not _costs_nothing(node) and (replayed or not saved):
            node.meta["recompute"] = RECOMPUTE
            # Two checkpointed blocks in a row would have what is between them saved.
            node.meta.pop("ac_graph_id", None)


def _follow(nodes: Iterable[Node], forward: GraphModule, backward: GraphModule) -> None:
    """Tag nodes as a split of a copy treated them: its backward reads them or computes them.

    What it does neither with, because something later was saved, stays untagged: min-cut decides
    if another choice around makes the backward need it after all.
    """
    read = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    computed = {node.name for node in backward.graph.find_nodes(op="call_function")}
    for node in nodes:
        if node.name in read and isinstance(node.meta.get("val"), torch.Tensor):
            for base in _bases(node):
                base.meta.setdefault("recompute", SAVE)
        elif node.name in computed and not _costs_nothing(node):
            node.meta.setdefault("recompute", RECOMPUTE)


def _bases(node: Node) -> Iterator[Node]:
    """A node, and through views and getitems what holds its memory.

    torch takes no notice of tags at views and getitems: they cost nothing.
    """
    while node.op == "call_function":
        yield node
        if not _costs_nothing(node):
            return
        node = node.all_input_nodes[0]


def _costs_nothing(node: Node) -> bool:
    """Getitems, views, and arithmetic on sizes."""
    if node.target is operator.getitem:
        return True
    if isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        return True
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
