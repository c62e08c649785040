"""The joint split: which values the forward saves and which the backward computes again.

torch's partitioners do the splitting. What is decided here goes to them as tags of nodes
(``node.meta["recompute"]``, as ``torch.utils.checkpoint`` sets them); tags of the user's stand.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fuseboard.contracts import JointPolicy, Knapsack
from fuseboard.hookspecs import hookimpl
from fuseboard.ops.draws import draws, hides_draws
from fuseboard.ops.effects import is_collective
from fuseboard.ops.views import is_view_op
from fuseboard.partition.marks import MEMORY_BUDGET, mark_of
from fuseboard.partition.replay import settle_replays, worth_replaying
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.copies import graph_module
from fuseboard.torch_api.partitioners import (
    default_partition,
    min_cut_partition,
    overwritten_inputs,
)

Parts = tuple[GraphModule, GraphModule]

SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE

#: How often min-cut is asked for less, until what it saves is within the budget.
_TRIES = 5

#: In a node's metadata: the tag is the board's own, since the node can't simply run again.
_KEPT = "fuseboard.kept"


@hookimpl(specname="fuseboard_partition_joint")
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
    _keep_what_cannot_repeat(joint, forward)
    whole = {"default": None, "recompute_all": 0.0, "min_cut": memory_budget}[policy]

    def min_cut(graph: GraphModule, budget: float) -> Parts:
        return min_cut_partition(
            graph, inputs, num_fwd_outputs, static_inputs, budget, knapsack, keywords
        )

    shares = _shares(forward, whole)
    # Every split of a copy comes before the first tag: it shows what its budget alone would choose.
    splits = {budget: _within(joint, budget, min_cut) for budget in shares if budget > 0}
    for budget, nodes in shares.items():
        if budget > 0:
            _follow(nodes, splits[budget][1])
        else:
            _recompute(nodes)
    if whole is None:
        parts = default_partition(joint, inputs, num_fwd_outputs, static_inputs, keywords)
    else:
        done = shares or whole == 1
        parts = min_cut(joint, 1.0) if done else _within(joint, whole, min_cut)
    settle_replays(*parts)
    return parts


def _within(joint: GraphModule, budget: float, min_cut: Callable[..., Parts]) -> Parts:
    """A split of a copy of ``joint`` that saves no more than the budget says.

    torch's own budget is a share of what its knapsack may choose from, which leaves out what
    min-cut saves besides: on GPT-2 0.5 saves 0.71 of the bytes. So what is saved is looked at, and
    torch asked for less until it fits.
    """
    full = min_cut(_copy(joint), 1.0)
    if budget == 1:
        return full
    copy = _copy(joint)
    _recompute(_forward_nodes(copy))
    bare = min_cut(copy, 1.0)
    least = _saved_bytes(bare[1])
    room = budget * (_saved_bytes(full[1]) - least)
    if room <= 0:
        return full
    asked = budget
    for _ in range(_TRIES):
        parts = min_cut(_copy(joint), asked)
        taken = _saved_bytes(parts[1]) - least
        if taken <= room:
            return parts
        asked *= 0.95 * room / taken
    return bare


def _saved_bytes(backward: GraphModule) -> int:
    """What a backward is given, each storage once; all but this is the same for every split."""
    sizes: dict[Any, int] = {}
    for node in backward.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not str(node.target).startswith("primals"):
            size = torch_internals.size_hint(value.numel()) * value.itemsize
            place = torch_internals.storage_address(value)
            sizes[place] = max(sizes.get(place, 0), size)
    return sum(sizes.values())


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
        shares.pop(1.0, None)  # what is left untagged is split by that very budget
    return shares


def _copy(graph: GraphModule) -> GraphModule:
    new = Graph()
    new.output(new.graph_copy(graph.graph, {}))
    return graph_module(graph, new, type(graph).__name__)


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


def _keep_what_cannot_repeat(joint: GraphModule, forward: Iterable[Node]) -> None:
    """Tag what would give something else if it ran again.

    Within a budget below 1 torch recomputes random ops other than dropout, ``rand_like`` and
    ``randn_like``, with other numbers (``OpTypes.is_random`` in 2.13). Those that the user
    checkpoints it replays, if they aren't inside of a higher-order op. What reads an input that is
    overwritten before the backward runs can't be repeated even if the user checkpoints it.
    """
    stale = overwritten_inputs(joint)  # such as statistics of a batch norm
    for node in forward:
        if is_view_op(node) and node.args[0] in stale:
            stale.add(node)
            continue
        lost = hides_draws(node, joint) or not stale.isdisjoint(node.all_input_nodes)
        if lost or (not _is_recomputed(node) and not _repeatable(node)):
            node.meta[_KEPT] = node.meta.get("recompute") is not SAVE
            node.meta["recompute"] = SAVE
            for user in node.users:
                if user.target is operator.getitem and _is_recomputed(user):
                    user.meta["recompute"] = SAVE


def _is_recomputed(node: Any) -> bool:
    return node.meta.get("recompute") in (RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _repeatable(node: Node) -> bool:
    return not (draws(node) or _has_effects(node) or node.meta.get("unbacked_bindings"))


def _has_effects(node: Node) -> bool:
    """Collectives, ops that write, ops that are ordered by tokens."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return is_collective(target) or target._schema.is_mutable
    return getattr(target, "__name__", "") == "with_effects"


# --- tags -----------------------------------------------------------------------------------------


def _recompute(nodes: Collection[Node]) -> None:
    """Tag all that can be computed again. Draws are replayed from their state: torch sees to it."""
    for node in nodes:
        saved = node.meta.get("recompute") is SAVE
        replayed = node.meta.get(_KEPT) and draws(node) and worth_replaying(node)
        if not _untagged(node) and (replayed or not saved):
            node.meta["recompute"] = RECOMPUTE
            # Two checkpointed blocks in a row would have what is between them saved.
            node.meta.pop("ac_graph_id", None)
    _tag_getitems(nodes)


def _tag_getitems(nodes: Iterable[Node]) -> None:
    """Tag getitems as what they are taken from."""
    for node in nodes:
        if node.target is operator.getitem and _is_recomputed(node.args[0]):
            node.meta.setdefault("recompute", RECOMPUTE)


def _follow(nodes: Collection[Node], backward: GraphModule) -> None:
    """Tag nodes as a split of a copy treated them: its backward reads them or computes them.

    What it does neither with, because something later was saved, stays untagged: min-cut decides
    if another choice around makes the backward need it after all.
    """
    read = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    computed = {node.name for node in backward.graph.nodes if node.op == "call_function"}
    for node in nodes:
        if node.name in read and isinstance(node.meta.get("val"), torch.Tensor):
            for base in _bases(node):
                base.meta.setdefault("recompute", SAVE)
        elif node.name in computed and not _untagged(node):
            node.meta.setdefault("recompute", RECOMPUTE)
    _tag_getitems(nodes)


def _bases(node: Node) -> Iterator[Node]:
    """A node, and through views and getitems what holds its memory.

    torch takes no notice of these tags at getitems and at the views that it knows.
    """
    while node.op == "call_function":
        yield node
        if node.target is not operator.getitem and not is_view_op(node):
            return
        node = node.all_input_nodes[0]


def _untagged(node: Node) -> bool:
    """Getitems follow what they are taken from; sizes are for the partitioner to see to."""
    symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
    return node.target is operator.getitem or isinstance(node.meta.get("val"), symbolic)
