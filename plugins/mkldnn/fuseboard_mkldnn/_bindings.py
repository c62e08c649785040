"""Torch's own Python functions in the place of op overloads.

Calling ``torch.add`` on small tensors took 1.8 us, ``torch.ops.aten.add.Tensor._op`` 3.2 (a
shared AVX2 machine, torch 2.13; ``addmm``: 3.4 against 6.3), and both do the same. At small sizes
that is a good part of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard_mkldnn import _ops
from fuseboard_mkldnn._graph import aten

#: Overload → a function that takes the same arguments, by position and by keyword.
BINDINGS: dict[Any, Callable[..., Any]] = {
    aten._unsafe_view.default: torch.Tensor.view,
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.addmv.default: torch.addmv,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.embedding.default: torch.embedding,
    aten.expand.default: torch.Tensor.expand,
    aten.gelu.default: _ops.nn.gelu,
    aten.linear.default: _ops.nn.linear,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.mv.default: torch.mv,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.neg.default: torch.neg,
    aten.permute.default: torch.permute,
    aten.relu.default: torch.relu,
    aten.rsqrt.default: torch.rsqrt,
    aten.select.int: torch.select,
    aten.sigmoid.default: torch.sigmoid,
    aten.silu.default: torch.nn.functional.silu,
    aten.sub.Tensor: torch.sub,
    aten.t.default: torch.t,
    aten.tanh.default: torch.tanh,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
}


def bind(graph: GraphModule) -> None:
    """Replace the targets of calls."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in BINDINGS:
            node.target = BINDINGS[node.target]
