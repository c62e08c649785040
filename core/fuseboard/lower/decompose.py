"""Bring a graph down to the level that a backend wants."""

from __future__ import annotations

import inspect
import operator
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.retracing import as_its_kernel_lays_out, retrace
from fuseboard.torch_api.symbols import in_the_example, why_unknown


def decompose(graph: GraphModule, table: dict[Any, Callable[..., Any]]) -> GraphModule:
    """The graph with the ops of ``table`` replaced by what they decompose into.

    Fake inputs come from the placeholders' ``meta["val"]``; stack traces are kept. A graph that
    holds no op of the table is returned as it is, without the cost of a retrace.

    :param graph: an ATen graph; it isn't changed.
    :param table: op overload → function, as ``torch._decomp.get_decompositions`` returns.
    """
    if not _holds_any(graph, table):
        return graph
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    lowered = retrace(graph, _distinct(inputs), table)
    old = [node for node in graph.graph.nodes if node.op == "placeholder"]
    new = [node for node in lowered.graph.nodes if node.op == "placeholder"]
    for before, after in zip(old, new, strict=True):
        after.meta.update(before.meta)
    _keep_strides(graph, lowered)
    return lowered


def keeping_layout(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """A table whose results lie in memory as those of the ops' kernels do.

    Kernels of norms and of softmax make row-major results of tensors that lie otherwise, while what
    they are taken apart into keeps the order of dimensions, as some of their fake kernels do. A
    joint graph is captured with a table, so nobody has the strides of its outputs from before.
    """
    return {
        op: partial(_laid_out, op, decomposition)
        if isinstance(op, torch._ops.OpOverload)
        else decomposition
        for op, decomposition in table.items()
    }


def _laid_out(op: Any, decomposition: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    results = decomposition(*args, **kwargs)
    if results is NotImplemented or not any(map(_is_reordered, tree_leaves((args, kwargs)))):
        return results
    wanted = as_its_kernel_lays_out(op, args, kwargs)
    if isinstance(results, torch.Tensor) and isinstance(wanted, torch.Tensor):
        return _laid_out_as(wanted, results)
    if not isinstance(results, tuple | list) or not isinstance(wanted, tuple | list):
        return results
    laid_out = list(map(_laid_out_as, wanted, results))
    return laid_out if type(results) is list else tuple(laid_out)  # which may have names


def _is_reordered(value: Any) -> bool:
    """Whether a tensor is known to lie otherwise than row-major; nothing is added to guards."""
    layout = _layout_in_the_example(value)
    if layout is None:
        return False
    step = 1
    for size, stride in zip(*map(reversed, layout), strict=True):
        if size != 1 and stride != step:
            return True
        step *= size
    return False


def _layout_in_the_example(value: Any) -> tuple[list[int], list[int]] | None:
    """Sizes and strides in the call that is compiled; None where there are none, or not yet."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or why_unknown(value):
        return None
    shape, strides = value.shape, value.stride()
    return [in_the_example(n) for n in shape], [in_the_example(n) for n in strides]


def _laid_out_as(wanted: Any, result: Any) -> Any:
    have, want = _layout_in_the_example(result), _layout_in_the_example(wanted)
    if have is None or want is None or have[0] != want[0]:
        return result
    order = _order_to_copy(*want, have[1])
    if order is None:
        return result
    copied = result.permute(order).clone(memory_format=torch.contiguous_format)
    return copied.permute(_inverse(order))


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _keep_strides(graph: GraphModule, lowered: GraphModule) -> None:
    """Copy outputs that a decomposition lays out otherwise, as Inductor's of ``cat`` may."""
    (wanted,), (output,) = (g.graph.find_nodes(op="output") for g in (graph, lowered))
    if not isinstance(output.args[0], tuple | list):
        return  # the body of a higher-order op, whose result is another op's operand
    results = list(output.args[0])
    copies: dict[Any, Node] = {}
    for place, (before, after) in enumerate(zip(wanted.args[0], results, strict=True)):
        if isinstance(after, Node) and isinstance(before, Node):
            order = _order_of_copy(before.meta.get("val"), after.meta.get("val"))
            if order is not None:
                if after not in copies:
                    with lowered.graph.inserting_before(output):
                        copies[after] = _copied(lowered, after, order)
                results[place] = copies[after]
    if copies:
        output.args = (tuple(results),)
        lowered.recompile()


def _order_of_copy(before: Any, after: Any) -> list[int] | None:
    """The same for values of nodes; None as well where numbers are symbolic."""
    if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)):
        return None
    if before.layout != torch.strided or after.layout != torch.strided:
        return None
    numbers = (*before.shape, *before.stride(), *after.stride())
    if any(not isinstance(n, int) for n in numbers):
        return None
    return _order_to_copy(before.shape, before.stride(), after.stride())


def _order_to_copy(
    shape: Sequence[int], strides: Sequence[int], have: Sequence[int]
) -> list[int] | None:
    """The order of dimensions in memory that a copy needs; None where strides are right already.

    None as well where a copy can't make them so: those that overlap or have gaps.

    :param strides: those that are wanted.
    """
    pairs = zip(strides, have, shape, strict=True)
    if 0 in shape or all(m == n or size == 1 for m, n, size in pairs):
        return None
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim]))
    step = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != step:
            return None
        step *= shape[dim]
    return order


def _copied(graph: GraphModule, node: Node, order: list[int]) -> Node:
    """A copy whose dimensions lie in memory in this order."""
    aten = torch.ops.aten
    steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.permute.default, (order,), {}),
        (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
        (aten.permute.default, (_inverse(order),), {}),
    ]
    for target, args, kwargs in steps:
        value = node.meta["val"]
        made = graph.graph.call_function(target, (node, *args), kwargs)
        made.meta = {key: held for key, held in node.meta.items() if key != "val"}
        with torch_internals.fake_mode_of([value]):
            made.meta["val"] = target(value, *args, **kwargs)
        node = made
    return node


def _holds_any(graph: GraphModule, table: dict[Any, Callable[..., Any]]) -> bool:
    """Whether an op of the table is in the graph, or in a graph that an op of it is given."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in table:
            return True
        if node.op == "get_attr":
            held = operator.attrgetter(str(node.target))(graph)
            if isinstance(held, GraphModule) and _holds_any(held, table):
                return True
    return False


def _distinct(inputs: Sequence[Any]) -> list[Any]:
    """Fake inputs, each an object of its own.

    Tracing knows a value by its object, and two inputs may have one: the calls of a
    ``nested_compile_region`` have the same fake results, which are then saved for the backward.
    """
    seen: set[int] = set()
    found = []
    for value in inputs:
        repeated = isinstance(value, torch.Tensor) and id(value) in seen
        seen.add(id(value))
        found.append(value.detach() if repeated else value)
    return found


def raised_in(table: Mapping[Any, Callable[..., Any]], error: BaseException) -> bool:
    """Whether a decomposition of a table raised an exception, or something that it called."""
    codes = set()
    for decomposition in table.values():
        function = inspect.unwrap(decomposition)
        while isinstance(function, partial):
            function = inspect.unwrap(function.func)
        codes.add(getattr(function, "__code__", None))
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code in codes for frame, _ in frames)
