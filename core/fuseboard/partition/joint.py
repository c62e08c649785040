"""The joint split: which values the forward saves and which the backward computes again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from fuseboard import torch_internals
from fuseboard.contracts import JointPolicy, Knapsack


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
    """torch's min-cut rematerialisation (``torch/_functorch/partitioners.py``).

    Checkpointed modules (``torch.utils.checkpoint``) are recomputed as the user asked.
    """
    return torch_internals.min_cut_partition(
        joint, inputs, num_fwd_outputs, static_inputs, memory_budget, keywords
    )
