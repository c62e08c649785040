"""``torch.autograd.Function`` in Dynamo's own graph, with the gradients of its gradients.

Dynamo traces a function's forward and backward into graphs of an op of its own. When torch 2.13
calls that op (``AutogradFunctionApply`` in ``torch/_functorch/autograd_function.py``), what was
saved has no history and the backward's graph switches gradients off, so that a second gradient is
dropped without a word. Here the two graphs are applied as eager applies the functions that they
were traced from. That a function is ``once_differentiable`` the graphs don't tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.torch_api.copies import copy_graph

_NAME = "autograd_function_apply"


def with_eager_functions(graph: GraphModule) -> GraphModule:
    """The graph itself, or a copy whose functions have second gradients."""
    if not any(map(_is_application, graph.graph.nodes)):
        return graph
    copy = copy_graph(graph)
    for node in filter(_is_application, copy.graph.nodes):
        node.target = _apply
    copy.recompile()
    return copy


def _is_application(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == _NAME


def _apply(
    forward_graph: GraphModule,
    backward_graph: GraphModule,
    *inputs: Any,
    non_differentiable_idx: Sequence[int] = (),
    saved_for_backward_idx: Sequence[int] = (),
    dirty_idx: Sequence[int] = (),
    **others: Any,
) -> Any:
    """Call a function of the user's on inputs."""
    saved: list[Any] = []
    gradients_of = _unguarded(backward_graph)

    class Applied(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            output, values = forward_graph(*inputs)
            saved.extend(values)
            return output

        @staticmethod
        def setup_context(context: Any, inputs: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple | list) else [output]
            context.mark_dirty(*(outputs[i] for i in dirty_idx))
            context.mark_non_differentiable(*(outputs[i] for i in non_differentiable_idx))
            # So inputs and outputs have their history in the backward, and nothing else has.
            context.save_for_backward(*(saved[i] for i in saved_for_backward_idx))
            for i in saved_for_backward_idx:
                saved[i] = None

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            values = list(saved)
            for i, value in zip(saved_for_backward_idx, context.saved_tensors, strict=True):
                values[i] = value
            return gradients_of(*gradients, *values)

    return Applied.apply(*inputs)  # type: ignore[no-untyped-call]


def _unguarded(backward: GraphModule) -> GraphModule:
    """A backward's graph without what Dynamo put around it: gradients off, and on again.

    Where code of the user's switches them off inside, they are.
    """
    copy = copy_graph(backward)
    calls = [node for node in copy.graph.nodes if node.op not in ("placeholder", "output")]
    if len(calls) > 1 and _sets_gradients(calls[0], False) and _sets_gradients(calls[-1], True):
        copy.graph.erase_node(calls[0])
        copy.graph.erase_node(calls[-1])
        copy.recompile()
    return copy


def _sets_gradients(node: Node, value: bool) -> bool:
    name = getattr(node.target, "__name__", "")
    return name == "_set_grad_enabled" and node.args == (value,)
