"""Random draws in a joint graph: which ops make them, and how a backward repeats them.

Where a draw is to be computed again, torch saves the generator's state before it in the forward and
runs the op under that state in the backward (``functionalize_rng_ops`` in
``torch/_functorch/partitioners.py``, read in 2.13).
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.ops.draws import call_draws
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.partitioners import state_wrappers

#: The state of the CPU's generator takes 5056 bytes, which would be saved in place of a draw.
_STATE_BYTES = 5056


def worth_replaying(node: Node) -> bool:
    """Whether what a draw gives takes more memory than a state, even if only a mask is kept."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, tuple | list) else value
    if not isinstance(first, torch.Tensor):
        return False
    return torch_internals.size_hint(first.numel()) > _STATE_BYTES


def settle_replays(forward: GraphModule, backward: GraphModule) -> None:
    """Undo what torch wrapped needlessly, and complete the metadata of the rest.

    It goes by the op's tag alone: attention without dropout has it too. Wrapped, no compiler
    knows the op, and a state is saved for it.
    """
    save, replay = state_wrappers()
    output = forward.graph.output_node()
    results: Any = output.args[0]
    states = [
        node
        for node in results
        if isinstance(node, Node)
        and node.target is operator.getitem
        and getattr(node.args[0], "target", None) is save
    ]
    replays = [
        user
        for placeholder in backward.graph.find_nodes(op="placeholder")
        for user in placeholder.users
        if user.target is replay and user.args[0] is placeholder
    ]
    if len(states) != len(replays):
        return  # wrapped in another way than was read: left as it is, which is right if slow
    for state, repeated in zip(states, replays, strict=True):
        drawn: Any = state.args[0]
        value = next(user for user in drawn.users if user.args[1] == 1)
        if call_draws(drawn.args[0], drawn.args[1:], drawn.kwargs):
            drawn.meta = {**value.meta, "val": (state.meta["val"], value.meta["val"])}
            repeated.meta = copy.copy(value.meta)
        else:
            results = tuple(node for node in results if node is not state)
            output.args = (results,)
            forward.graph.erase_node(state)
            _unwrap(forward, drawn, value, first=1)
            placeholder: Any = repeated.args[0]
            _unwrap(backward, repeated, repeated, first=2)
            backward.graph.erase_node(placeholder)
    forward.recompile()
    backward.recompile()


def _unwrap(graph: GraphModule, wrapped: Node, value: Node, first: int) -> None:
    """Call the op itself; its arguments begin at ``first``, ``value`` is where its result is."""
    arguments: Any = wrapped.args
    with graph.graph.inserting_before(wrapped):
        plain = graph.graph.call_function(arguments[first - 1], arguments[first:], wrapped.kwargs)
    plain.meta = copy.copy(value.meta)
    value.replace_all_uses_with(plain)
    graph.graph.erase_node(value)
    if wrapped is not value:
        graph.graph.erase_node(wrapped)
