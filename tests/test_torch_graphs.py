"""Graphs as bytes: what comes out is what went in."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.utils import _pytree

import fuseboard
from fuseboard.torch_api import dynamo_graphs
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.graph_pickler import dumps, loads
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


class _Watched(dict):
    """A registry that counts what is registered while it is looked at."""

    writes = 0

    def __setitem__(self, key, value):
        self.writes += 1
        super().__setitem__(key, value)


def test_nothing_is_registered_with_pytree_meanwhile(monkeypatch):
    """Dynamo guards on the registry: another thread's functions would be compiled again."""
    watched = _Watched(_pytree.SUPPORTED_NODES)
    monkeypatch.setattr(_pytree, "SUPPORTED_NODES", watched)
    graph_from_bytes(graph_to_bytes(_sliced(), []))
    assert watched.writes == 0


def _sliced() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.sin, (x,)),))
    return GraphModule({}, graph)


def test_slices_arrive_with_the_nodes_in_them():
    """Of Dynamo's graphs, whose indices may be computed."""
    graph = Graph()
    x = graph.placeholder("x")
    length = graph.call_method("argmax", (x,))
    index = (slice(None, length, 2), None, [slice(1, 2)])
    graph.output((graph.call_function(max, (x, index)),))
    sent = GraphModule({}, graph)
    made = dynamo_graphs.graph_from_bytes(dynamo_graphs.graph_to_bytes(sent), frozenset())
    assert made.code == sent.code
    length = next(node for node in made.graph.nodes if node.op == "call_method")
    taken = next(node for node in made.graph.nodes if node.target is max)
    assert taken.args[1] == (slice(None, length, 2), None, [slice(1, 2)])
    assert length.users.keys() == {taken}


def test_fake_values_arrive_as_they_were():
    """Sizes, strides, offsets, dtypes, and which of them share a storage."""
    with FakeTensorMode() as mode:
        base = torch.empty(6, 5, dtype=torch.bfloat16)
        values = [
            base,
            base.t(),
            base[1:, ::2],
            torch.empty(3, 1).expand(3, 4),
            torch.empty(0, 3, dtype=torch.int8),
            torch.empty((), dtype=torch.bool),
            torch.empty(2, requires_grad=True),
        ]
        values.append(values[2])
    read = FakeTensorMode()
    made = loads(dumps(values, ()), read)
    for value, other in zip(values, made, strict=True):
        assert other.fake_mode is read
        for what in ("dtype", "shape", "device", "requires_grad"):
            assert getattr(other, what) == getattr(value, what)
        assert other.stride() == value.stride()
        assert other.storage_offset() == value.storage_offset()
    assert made[2] is made[-1]
    arrived = [value.untyped_storage()._cdata for value in made[:4]]
    assert arrived[0] == arrived[1] == arrived[2] != arrived[3]
    assert made[0].untyped_storage().nbytes() == 60
    assert mode is not read
