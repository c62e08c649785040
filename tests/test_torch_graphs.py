"""Graphs as bytes: what comes out is what went in."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

import fuseboard
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.graphs import graph_from_bytes, graph_to_bytes
from tests.support.backends import all_trips, compiled, plugged
from tests.support.values import rnd


def _branches(x):
    def inner(a):
        return torch.cond(a.sum() > 2, torch.sin, torch.cos, (a,))

    return torch.cond(x[0] > 0, inner, lambda a: a - 1, (x,)) + 1


def _loop(x):
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a * 1.5), (torch.tensor(0), x))[1]


PROGRAMS = {"branches in a branch": (_branches, 5), "loop": (_loop, 3)}


@pytest.mark.parametrize(("program", "number"), PROGRAMS.values(), ids=PROGRAMS.keys())
def test_graphs_inside_of_control_flow_arrive_with_their_code(program, number):
    codes = []

    def lower(region):
        inputs = [node.meta["val"] for node in region.graph.graph.find_nodes(op="placeholder")]
        sent = graph_to_bytes(region.graph, inputs)
        with torch_internals.real_tensors():  # another process has no fake mode
            graph, _, _ = graph_from_bytes(sent)
        codes.extend((_codes(region.graph), _codes(graph)))
        return fuseboard.lower_eagerly(region)

    with plugged(lower=lower) as backend, torch.no_grad():
        compiled(program, backend, on_failure="raise")(rnd(3))
    there, here = codes
    assert here == there
    assert len(there) == number
    assert not all_trips()


def _codes(graph: GraphModule) -> dict[str, str]:
    """Each graph's code, by its path."""
    held = {name: one for name, one in graph.named_modules() if isinstance(one, GraphModule)}
    assert all(type(one).forward is not torch.nn.Module.forward for one in held.values())
    return {name: one.code.strip() for name, one in held.items()}
