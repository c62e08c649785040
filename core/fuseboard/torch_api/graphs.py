"""Graphs as bytes, for another process.

torch's pickler keeps fake values with their ShapeEnv, guards and ranges included, and makes
constants fake; see :mod:`fuseboard.torch_api.graph_pickler`.
"""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from fuseboard.errors import LoweringError, error_text
from fuseboard.torch_api import internals as torch_internals


def graph_to_bytes(
    graph: GraphModule, inputs: Sequence[Any], metadata: Collection[str] = ("val",)
) -> bytes:
    """A graph with its fake values, its fake inputs, and its constants.

    :param metadata: what nodes take along; ``val`` is the fake value.
    :raises LoweringError: something in it can't be sent, or this torch can't.
    """
    try:
        from fuseboard.torch_api.graph_pickler import dumps

        sent = dumps((graph, list(inputs)), metadata)
        held = constants_to_bytes(graph)
    except Exception as error:  # whatever the code of an object in the graph raises
        raise LoweringError(
            f"its graph can't be sent to another process: {error_text(error)}"
        ) from error
    return pickle.dumps((sent, held))


def constants_to_bytes(graph: GraphModule) -> bytes:
    """The tensors that a graph, and the graphs in it, hold."""
    held = io.BytesIO()
    with torch_internals.real_tensors():
        torch.save(dict(_constants(graph, "")), held)
    return held.getvalue()


def constants_from_bytes(graph: GraphModule, data: bytes) -> None:
    """Give a graph the tensors that :func:`constants_to_bytes` found in it."""
    with torch_internals.real_tensors():
        held = torch.load(io.BytesIO(data), weights_only=True)
    for path, tensor in held.items():
        owner, _, name = path.rpartition(".")
        setattr(operator.attrgetter(owner)(graph) if owner else graph, name, tensor)


def graph_from_bytes(data: bytes) -> tuple[GraphModule, list[Any], Any]:
    """The graph, its inputs, and the fake mode of both."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from fuseboard.torch_api.graph_pickler import loads

    sent, held = pickle.loads(data)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    graph, inputs = loads(sent, mode)
    constants_from_bytes(graph, held)
    return graph, inputs, mode


def _constants(graph: GraphModule, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a graph, and the graphs in it, hold: (dotted path, tensor)."""
    for node in graph.graph.find_nodes(op="get_attr"):
        held = operator.attrgetter(str(node.target))(graph)
        if isinstance(held, GraphModule):
            yield from _constants(held, f"{prefix}{node.target}.")
        elif isinstance(held, torch.Tensor):
            yield f"{prefix}{node.target}", held.detach()


#: Control flow: torch says of none of these whether it is all in its arguments, and it is.
_CONTROL_FLOW = frozenset(
    {"cond", "while_loop", "scan", "map_impl", "associative_scan", "wrap_with_set_grad_enabled"}
)


def cacheable(operator: Any) -> bool:
    """Whether all that a higher-order operator does is in its arguments and the graphs among them.

    Triton kernels of the user's are numbers of a table of this process
    (``torch/_higher_order_ops/triton_kernel_wrap.py``), which Inductor looks up for its own keys.
    """
    if "triton" in getattr(operator, "__module__", "") or "triton" in str(operator):
        return False
    if getattr(operator, "__name__", "") in _CONTROL_FLOW:
        return True
    known = getattr(operator, "cacheable", None)
    return bool(known()) if callable(known) else False
