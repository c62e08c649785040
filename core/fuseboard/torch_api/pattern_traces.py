"""Traces of small functions down to ATen, forward alone or with their backward.

Read against torch 2.13 (``torch/fx/experimental/proxy_tensor.py``, ``torch/autograd/__init__.py``).
``make_fx`` over a forward and ``torch.autograd.grad`` gives the nodes that AOTAutograd's joint
graphs have; ``torch._inductor.pattern_matcher`` calls AOTAutograd for it, and imports Inductor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from fuseboard.torch_api.compiling import alone_in_tracing
from fuseboard.torch_api.internals import fake_mode_of, isolated_tracing

#: Calls with tensors and numbers, in the order of a function's parameters.
Function = Callable[..., Any]
Table = Mapping[Any, Callable[..., Any]]


def fake_like(values: Sequence[Any]) -> list[Any]:
    """Fake tensors of the forms of tensors, each an object of its own; other values as they are.

    A tracer knows values by their objects, so that one that is passed twice would be one input.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
    with mode or FakeTensorMode(), torch.inference_mode(False):
        return [
            torch.empty_strided(v.size(), v.stride(), dtype=v.dtype, device=v.device)
            if isinstance(v, torch.Tensor)
            else v
            for v in values
        ]


def trace_forward(function: Function, values: Sequence[Any], table: Table) -> GraphModule:
    """A function of fake tensors as a graph, as AOTAutograd captures inference.

    :param table: op → what it decomposes into.
    """
    with torch.inference_mode(False), torch.no_grad():
        return _traced(lambda *inputs: tree_leaves(function(*inputs)), values, table)


def trace_joint(
    function: Function,
    values: Sequence[Any],
    wanted: Sequence[int],
    arriving: Sequence[int],
    shared: Sequence[int],
    table: Table,
) -> GraphModule:
    """A function of fake tensors with its backward, as AOTAutograd captures training.

    The graph's inputs are the values, then a gradient for each result of ``arriving`` and one for
    each input of ``shared``, to which the function's are added, as autograd does where a later op
    reads the input, too. It returns the results, then the gradients of the inputs of ``wanted``,
    None for those without.
    """
    with torch.inference_mode(False), torch.enable_grad(), _fakes_of(values):
        leaves = [
            value.detach().requires_grad_(place in wanted)
            if isinstance(value, torch.Tensor)
            else value
            for place, value in enumerate(values)
        ]
        results = tree_leaves(function(*leaves))
        tangents = [
            torch.empty_strided(r.size(), r.stride(), dtype=r.dtype, device=r.device)
            for r in (*(results[n] for n in arriving), *(leaves[n] for n in shared))
        ]

        def both(*inputs: Any) -> list[Any]:
            own, given = inputs[: len(leaves)], inputs[len(leaves) :]
            made = tree_leaves(function(*own))
            grads = torch.autograd.grad(
                [*(made[place] for place in arriving), *(own[place] for place in shared)],
                [own[place] for place in wanted],
                given,
                allow_unused=True,
            )
            return [*made, *grads]

        return _traced(both, [*leaves, *tangents], table)


def _traced(function: Function, values: Sequence[Any], table: Table) -> GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    with _fakes_of(values), alone_in_tracing():
        before = _versions(values)
        function(*values)
        # Writes to inputs stay in the graph, to be seen; AOTAutograd moves them to its end.
        pure = _without_writes(function) if before == _versions(values) else function
        graph = make_fx(pure, decomposition_table=dict(table))(*values)
    graph.graph.eliminate_dead_code()
    return graph


def _versions(values: Sequence[Any]) -> list[int]:
    return [value._version for value in values if isinstance(value, torch.Tensor)]


def _without_writes(function: Function) -> Function:
    """The same without writing to what it has made, as AOTAutograd does it.

    Composites of torch's come out otherwise (dropout, RMS norm), and those of C++ are left as they
    are by ``torch.func.functionalize``.
    """
    from torch._subclasses import functional_tensor

    functionalize = getattr(functional_tensor, "dispatch_functionalize", None)
    return function if functionalize is None else functionalize(function)


@contextlib.contextmanager
def _fakes_of(values: Sequence[Any]) -> Iterator[None]:
    """What is around a trace: no context of the graph that is being compiled, no autocast."""
    from torch._dispatch.python import enable_python_dispatcher

    mode = fake_mode_of(values)
    with (
        isolated_tracing(mode),
        mode if mode is not None else contextlib.nullcontext(),
        enable_python_dispatcher(),
        torch._C._DisableAutocast(),
    ):
        yield


def arguments(node: Node) -> list[tuple[str, Any]]:
    """A call's arguments by name, in the order of its op's schema, defaults filled in."""
    if not isinstance(node.target, torch._ops.OpOverload):
        positional = [(str(place), value) for place, value in enumerate(node.args)]
        return [*positional, *sorted(node.kwargs.items())]
    given = dict(node.kwargs)
    found = []
    for place, one in enumerate(node.target._schema.arguments):
        if one.name in given:
            value = given[one.name]
        elif not one.kwarg_only and place < len(node.args):
            value = node.args[place]
        else:
            value = one.default_value
        found.append((one.name, value))
    return found


def written_arguments(node: Node) -> list[Node]:
    """The nodes that a call writes to."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    written = {
        one.name
        for one in node.target._schema.arguments
        if one.alias_info is not None and one.alias_info.is_write
    }
    values = [value for name, value in arguments(node) if name in written]
    return [value for value in tree_leaves(values) if isinstance(value, Node)]
