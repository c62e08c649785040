"""Modes of ``__torch_function__`` that Dynamo left out of a graph which eager would run under them.

torch 2.13 hands the call of a checkpoint to the modes as if it were a function of torch's, and
traces its body with all of them off (``dispatch_torch_function`` in
``torch/_dynamo/variables/torch_function.py``). In eager a checkpoint is Python code, and the modes
see each function of its body instead. What a mode makes of the checkpoint as a whole is in the
graph, too, so no graph can be made right: eager runs the user's code. A mode that is entered and
left inside of that code leaves no trace of itself to be found here.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from fuseboard.capture.checkpoints import CHECKPOINT
from fuseboard.torch_api import modes as torch_modes
from fuseboard.torch_api.nodes import graphs_in


def why_untraced(graph: GraphModule) -> str:
    """Why a graph of Dynamo's isn't what eager computes; "" if it is."""
    modes = torch_modes.function_modes()
    bodies = list(_checkpoint_bodies(graph)) if modes else []
    nodes = [node for body in bodies for one in graphs_in(body) for node in one.graph.nodes]
    names = sorted({type(m).__name__ for m in modes if any(_may_change(m, n) for n in nodes)})
    if not names:
        return ""
    return (
        f"Dynamo doesn't trace modes of __torch_function__ ({', '.join(names)}) into the body of a "
        "checkpoint"
    )


def _may_change(mode: object, node: Node) -> bool:
    device = torch_modes.default_device_of(mode)
    if device is None:
        return True
    makes = node.op == "call_function" and torch_modes.takes_default_device(node.target)
    return makes and device.type != "cpu"


def _checkpoint_bodies(graph: GraphModule) -> Iterator[GraphModule]:
    for one in graphs_in(graph):
        for node in one.graph.find_nodes(op="call_function", target=CHECKPOINT):
            body = node.args[0]
            assert isinstance(body, Node)
            yield getattr(one, str(body.target))
