"""Copies of graphs are what fx's own copies are, whichever way they are made."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fuseboard.torch_api import copies as torch_copies
from fuseboard.torch_api.copies import copy_graph
from tests.support.graphs import Recipe, recipes

aten = torch.ops.aten


@pytest.fixture
def fx_way(monkeypatch):
    """Graphs are copied as with a torch that :mod:`fuseboard.torch_api.copies` doesn't know."""
    monkeypatch.setattr(torch_copies, "_is_known", lambda: False)


def written(graph: Graph) -> list[tuple[object, ...]]:
    """All that is to be seen of a graph's nodes, with names in the place of nodes."""

    def named(value: object) -> str:
        return repr(map_arg(value, lambda node: f"%{node.name}"))

    return [
        (
            (node.op, node.name, str(node.target), node.type),
            (named(node.args), named(node.kwargs)),
            [used.name for used in node.all_input_nodes],
            sorted(user.name for user in node.users),
            {key: id(value) for key, value in node.meta.items()},
        )
        for node in graph.nodes
    ]


def odd_graph() -> GraphModule:
    """Names that fx didn't give, nested arguments, keywords, a type, a constant, an unused node."""
    owner = nn.Module()
    owner.register_buffer("table", torch.arange(3.0))
    graph = Graph()
    x = graph.placeholder("x", type_expr=torch.Tensor)
    table = graph.get_attr("table")
    joined = graph.call_function(aten.cat.default, ([x, table, x],))
    joined.name = "add_7"
    narrow = graph.call_function(aten.slice.Tensor, (joined, 0, 1, 9223372036854775807))
    narrow.meta = {"val": "fake", "stack_trace": "a line"}
    graph.call_function(aten.full.default, ([2], 1.0), {"dtype": torch.float32}, name="add_3")
    graph.output([narrow, None, {"first": x}])
    return GraphModule(owner, graph)


def test_a_copy_is_its_original():
    """Ops, names, arguments, readers and metadata agree; so does what it computes."""
    graph = odd_graph()
    copied = copy_graph(graph)
    copied.graph.lint()
    assert written(copied.graph) == written(graph.graph)
    first, none, others = copied(torch.tensor([5.0]))
    assert first.tolist() == [0.0, 1.0, 2.0, 5.0]
    assert none is None
    assert others["first"].tolist() == [5.0]


def test_a_copy_is_ones_own():
    """What is done to a copy leaves its original, and the original's metadata, as they were."""
    graph = odd_graph()
    before = written(graph.graph)
    copied = copy_graph(graph)
    for node in copied.graph.nodes:
        node.meta["mine"] = True
    copied.graph.eliminate_dead_code()
    copied.graph.find_nodes(op="get_attr")[0].replace_all_uses_with(
        copied.graph.find_nodes(op="placeholder")[0]
    )
    assert written(graph.graph) == before
    assert len(copied.graph.nodes) == len(graph.graph.nodes) - 1


def edited(graph: GraphModule) -> list[object]:
    """What a copy is after nodes were found, added, renamed by fx and removed in it."""
    copied = copy_graph(graph).graph
    copied.lint()
    first = copied.find_nodes(op="placeholder")[0]
    found = [node.name for node in copied.find_nodes(op="call_function", target=aten.add.Tensor)]
    with copied.inserting_before(copied.output_node()):
        new = [copied.call_function(aten.add.Tensor, (first, first)) for _ in range(3)]
    names = [node.name for node in new]
    assert len({node.name for node in copied.nodes}) == len(copied.nodes)
    copied.erase_node(new[1])
    copied.lint()
    return [found, names, len(copied.nodes), written(copied)]


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(recipes())
def test_copies_are_those_that_fx_makes(recipe: Recipe):
    """The quick way and fx's own lead to equal graphs, also once they are edited."""
    graph = recipe.make()
    quick = written(copy_graph(graph).graph), edited(graph)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_copies, "_is_known", lambda: False)
        slow = written(copy_graph(graph).graph), edited(graph)
    assert quick == slow


@pytest.mark.usefixtures("fx_way")
def test_a_torch_that_is_not_known_is_asked():
    """Where graphs aren't made as they are known to be, fx copies them."""
    test_a_copy_is_ones_own()


def test_this_torch_is_known():
    """The quick way is taken with the torch that is installed."""
    assert torch_copies._is_known()


def test_nodes_go_behind_those_that_are_there():
    """Copies are appended to a graph, and read what was put in the place of their inputs."""
    graph = odd_graph().graph
    (x,) = graph.find_nodes(op="placeholder")
    joined = next(node for node in graph.nodes if node.target is aten.cat.default)
    (table,) = graph.find_nodes(op="get_attr")
    new = Graph()
    copies: dict[Node, Node] = {x: new.placeholder("left"), table: new.placeholder("right")}
    torch_copies.copy_nodes([joined], new, copies)
    new.output(copies[joined])
    new.lint()
    assert [node.name for node in new.nodes] == ["left", "right", "add_7", "output"]
    assert copies[joined].args == ([copies[x], copies[table], copies[x]],)
