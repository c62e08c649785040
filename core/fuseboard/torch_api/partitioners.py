"""Splits of joint graphs by torch's partitioners (``torch/_functorch/partitioners.py``, 2.13)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves


def min_cut_partition(
    joint: GraphModule,
    inputs: Sequence[Any],
    num_fwd_outputs: int,
    static_inputs: Sequence[int],
    memory_budget: float,
    knapsack: str,
    keywords: dict[str, Any],
) -> tuple[GraphModule, GraphModule]:
    """torch's min-cut rematerialisation with a memory budget. It changes ``joint``.

    A budget of 0 would save the inputs alone, whatever ``node.meta["recompute"]`` says, and draw
    random numbers anew (``choose_saved_values_set``): tag what is to be recomputed instead.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return _partition(
        min_cut_rematerialization_partition,
        {"activation_memory_budget": memory_budget, "activation_memory_budget_solver": knapsack},
        (joint, inputs, num_fwd_outputs, static_inputs, keywords),
    )


def default_partition(
    joint: GraphModule,
    inputs: Sequence[Any],
    num_fwd_outputs: int,
    static_inputs: Sequence[int],
    keywords: dict[str, Any],
) -> tuple[GraphModule, GraphModule]:
    """torch's split that saves whatever the backward reads. It changes ``joint``."""
    from torch._functorch.partitioners import default_partition as torch_default_partition

    return _partition(
        torch_default_partition, {}, (joint, inputs, num_fwd_outputs, static_inputs, keywords)
    )


def _partition(
    partitioner: Callable[..., tuple[GraphModule, GraphModule]],
    settings: dict[str, Any],
    arguments: tuple[GraphModule, Sequence[Any], int, Sequence[int], dict[str, Any]],
) -> tuple[GraphModule, GraphModule]:
    """Call a partitioner with what it takes, under settings of ``torch._functorch.config``."""
    from torch._functorch import config

    joint, inputs, num_fwd_outputs, static_inputs, keywords = arguments
    accepted = inspect.signature(partitioner).parameters
    further = {key: value for key, value in keywords.items() if key in accepted}
    if "static_lifetime_input_indices" in accepted:
        further["static_lifetime_input_indices"] = list(static_inputs)
    # On CUDA, draws to be replayed would come from a generator of their own, not be eager's.
    if hasattr(config, "graphsafe_rng_functionalization"):
        settings = {**settings, "graphsafe_rng_functionalization": False}
    with config.patch(settings):
        return partitioner(joint, inputs, num_fwd_outputs=num_fwd_outputs, **further)


def overwritten_inputs(joint: GraphModule) -> set[Node]:
    """The inputs of a joint graph that AOTAutograd overwrites after the forward.

    It describes inputs and outputs in ``meta["desc"]``
    (``torch/_functorch/_aot_autograd/descriptors.py``): an output that is the new value of an input
    names that input's description. ``TracingContext.fw_metadata`` isn't filled in yet.
    """
    described = joint.graph.output_node().meta.get("desc") or ()
    written = [getattr(item, "mutated_input", None) for item in tree_leaves(list(described))]
    inputs = joint.graph.find_nodes(op="placeholder")
    return {node for node in inputs if node.meta.get("desc") in [w for w in written if w]}


def state_wrappers() -> tuple[Any, Any]:
    """The higher-order ops that run a random op and save the state before it, or under a state."""
    from torch._prims import rng_prims

    return rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state
