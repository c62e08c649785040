"""``torch.autograd.Function`` in Dynamo's own graph, with the gradients of its gradients.

Dynamo traces a function's forward and backward into graphs of an op of its own. When torch 2.13
calls that op (``AutogradFunctionApply`` in ``torch/_functorch/autograd_function.py``), what was
saved has no history and the backward's graph switches gradients off, so that a second gradient is
dropped without a word. Here the two graphs are applied as eager applies the functions that they
were traced from. That a backward is ``once_differentiable`` is told by where its ops were traced:
in a function that torch's decorator calls. So is where its code switches gradients off
(:mod:`fuseboard.capture.source_grad_modes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd.function import once_differentiable
from torch.fx import Graph, GraphModule, Node

from fuseboard.capture.source_grad_modes import gradients_are_on
from fuseboard.torch_api.copies import copy_graph

_NAME = "autograd_function_apply"

#: Where torch's decorator calls the function that it is given, as a node's stack trace has it.
_ONCE = f'File "{once_differentiable.__code__.co_filename}", line '

#: What computes gradients, for each backward's graph of Dynamo's.
_backwards: WeakKeyDictionary[GraphModule, Callable[..., Any]] = WeakKeyDictionary()


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
    gradients_of = _backward_of(backward_graph)

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
            return gradients_of(context, gradients, values)

    return Applied.apply(*inputs)  # type: ignore[no-untyped-call]


def _backward_of(graph: GraphModule) -> Callable[..., Any]:
    """What computes gradients from a function's context, those of its results and what it saved."""
    if (known := _backwards.get(graph)) is None:
        known = _backwards[graph] = _made_backward(graph)
    return known


def _made_backward(graph: GraphModule) -> Callable[..., Any]:
    unguarded = _unguarded(graph)

    def backward(context: Any, gradients: Sequence[Any], values: Sequence[Any]) -> Any:
        return unguarded(*gradients, *values)

    if not _is_once_differentiable(graph):
        return backward

    def once(context: Any, gradients: Sequence[Any], values: Sequence[Any]) -> Any:
        @once_differentiable
        def of_gradients(context: Any, *gradients: Any) -> Any:
            return unguarded(*gradients, *values)

        return of_gradients(context, *gradients)

    return once


def _is_once_differentiable(graph: GraphModule) -> bool:
    """Whether a backward was traced in the function that ``once_differentiable`` makes.

    Where nobody knows whether gradients are on in it, it is better to say so.
    """
    if not _source_tells_modes(graph):
        return True
    traces = [node.stack_trace or "" for node in graph.graph.nodes]
    places = (line for trace in traces for line in trace.splitlines() if _ONCE in line)
    return any(line.endswith(", in wrapper") for line in places)


def _unguarded(backward: GraphModule) -> GraphModule:
    """A backward's graph without what Dynamo put around it: gradients off, and on again.

    Where code of the user's switches them off inside, they are: Dynamo left that out.
    """
    copy = copy_graph(backward)
    calls = [node for node in copy.graph.nodes if node.op not in ("placeholder", "output")]
    if len(calls) > 1 and _sets_gradients(calls[0], False) and _sets_gradients(calls[-1], True):
        copy.graph.erase_node(calls[0])
        copy.graph.erase_node(calls[-1])
        _switch_off(copy.graph, calls[1:-1])
        copy.recompile()
    return copy


def _switch_off(graph: Graph, nodes: Sequence[Node]) -> None:
    """Put gradients off around the nodes that the user's code has off, and on behind them."""
    on = True
    for node in nodes:
        if _mode_set_by(node) is not None:
            graph.erase_node(node)
        elif (found := gradients_are_on(node, around=True) is not False) != on:
            on = found
            with graph.inserting_before(node):
                graph.call_function(torch._C._set_grad_enabled, (on,))
    if not on:
        with graph.inserting_before(graph.output_node()):
            graph.call_function(torch._C._set_grad_enabled, (True,))


def _source_tells_modes(graph: GraphModule) -> bool:
    """Whether the source explains the switches that Dynamo's trace has, with gradients off."""
    on = False
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if (switched := _mode_set_by(node)) is not None:
            on = switched
        elif gradients_are_on(node, around=False) != on:
            return False
    return True


def _mode_set_by(node: Node) -> bool | None:
    """What a node switches gradients to; None for one that doesn't."""
    return next((value for value in (False, True) if _sets_gradients(node, value)), None)


def _sets_gradients(node: Node, value: bool) -> bool:
    name = getattr(node.target, "__name__", "")
    return name == "_set_grad_enabled" and node.args == (value,)
