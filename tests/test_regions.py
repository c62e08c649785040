"""Cutting a planned graph into regions: nothing lost, nothing twice, an order that works."""

from __future__ import annotations

import operator
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fuseboard.ops.effects import keeps_order
from fuseboard.partition.board_nodes import board_nodes
from fuseboard.partition.regions import cut_regions
from fuseboard.partition.signature import signature
from fuseboard.partition.stages import stage_nodes
from fuseboard.report.data import ledger
from tests.support.backends import (
    all_trips,
    claim_all,
    claim_ops,
    compiled,
    graph_count,
    last_graph,
    plugged,
)
from tests.support.values import assert_same, rnd

aten = torch.ops.aten
ALTERNATE = {"stages": {"plan": "tests.support.plans:alternate"}}
SHUFFLED = {"stages": {"plan": "tests.support.plans:shuffled"}}

# --- random graphs, random placements ------------------------------------------------------------

UNARY = (aten.relu.default, aten.neg.default, aten.t.default, aten.abs.default)
BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.maximum.default)
RANDOM = (aten.rand_like.default, aten.bernoulli.p)


@st.composite
def placed_graphs(draw):
    """A graph over 4x4 tensors and a backend out of three for each op."""
    module, placements = nn.Module(), {}
    graph = Graph()
    values = [graph.placeholder(f"x{i}") for i in range(draw(st.integers(1, 3)))]
    for value in values:
        value.meta["val"] = torch.empty(4, 4)
    for _ in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["unary", "binary", "random", "several"]))
        pick = partial(draw, st.sampled_from(values))
        if kind == "unary":
            node = graph.call_function(draw(st.sampled_from(UNARY)), (pick(),))
        elif kind == "binary":
            node = graph.call_function(draw(st.sampled_from(BINARY)), (pick(), pick()))
        elif kind == "random":
            node = graph.call_function(RANDOM[0], (pick(),))
        else:
            node = graph.call_function(aten.var_mean.dim, (pick(), [1]), {"keepdim": True})
            node.meta["val"] = (torch.empty(4, 1), torch.empty(4, 1))
            placements[node.name] = draw(st.sampled_from("abc"))
            items = [graph.call_function(operator.getitem, (node, i)) for i in (0, 1)]
            for item in items:
                item.meta["val"] = torch.empty(4, 1)
                placements[item.name] = placements[node.name]
            node = graph.call_function(aten.add.Tensor, (items[0], pick()))
        node.meta["val"] = torch.empty(4, 4)
        placements[node.name] = draw(st.sampled_from("abc"))
        values.append(node)
    results = draw(st.lists(st.sampled_from(values), min_size=1, max_size=4))
    graph.output(tuple(results))
    graph.lint()
    return GraphModule(module, graph), placements


def run(graph: GraphModule, cuts, kept, inputs):
    """The cuts in order, then the board's own nodes, as the runner does it."""
    names = dict(zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for cut in cuts:
        results = cut.graph(*[names[node] for node in cut.inputs])
        names.update(zip(cut.outputs, results, strict=True))
    for node in kept:
        if all(used in names for used in node.all_input_nodes):
            args = torch.fx.map_arg(node.args, names.__getitem__)
            names[node] = node.target(*args, **node.kwargs)
    output = next(node for node in graph.graph.nodes if node.op == "output")
    return torch.fx.map_arg(output.args[0], names.__getitem__)


@settings(max_examples=150, deadline=None)
@given(placed_graphs())
@pytest.mark.thorough
def test_the_regions_in_order_give_the_graphs_results(case):
    """Whatever the placements: also with random ops, whose order is kept."""
    graph, placements = case
    kept = board_nodes(graph)
    cuts = cut_regions(graph, placements, list(kept))
    inputs = [rnd(4, 4, seed=i) for i in range(len(graph.graph.find_nodes(op="placeholder")))]
    torch.manual_seed(7)
    want = graph(*inputs)
    torch.manual_seed(7)
    assert_same(tuple(run(graph, cuts, list(kept), inputs)), tuple(want))


@settings(max_examples=150, deadline=None)
@given(placed_graphs())
def test_regions_cover_each_node_once(case):
    """Each placed node is in one region, of its backend; a getitem is with what made it."""
    graph, placements = case
    kept = board_nodes(graph)
    cuts = cut_regions(graph, placements, list(kept))
    home = {node: number for number, cut in enumerate(cuts) for node in cut.nodes}
    assert sum(len(cut.nodes) for cut in cuts) == len(home)
    for node in graph.graph.nodes:
        if node.op != "call_function" or node in kept:
            continue
        assert cuts[home[node]].backend == placements[node.name]
        if node.target is operator.getitem:
            assert home[node] == home[node.args[0]]
        # what it reads was made before, and is an input where another region made it
        for used in node.all_input_nodes:
            if used in home:
                assert home[used] <= home[node]
                assert home[used] == home[node] or used in cuts[home[node]].inputs
    ordered = [node for node in graph.graph.nodes if node.op == "call_function"]
    draws = [home[node] for node in ordered if keeps_order(node) and node in home]
    assert draws == sorted(draws)


@settings(max_examples=50, deadline=None)
@given(placed_graphs())
def test_regions_depend_on_earlier_stages_only(case):
    """The reason that no region can depend on itself through another one."""
    graph, placements = case
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    stages = stage_nodes(nodes, placements)
    for node in nodes:
        for used in node.all_input_nodes:
            if used in stages and stages[used] != stages[node]:
                assert stages[used][0] < stages[node][0]


# --- signatures ----------------------------------------------------------------------------------


def traced(function, *args) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def test_what_is_computed_again_runs_right_before_it_is_read():
    """Two regions that wait for nothing: each is called where the graph has it."""
    graph = Graph()
    tangent, first, second = (graph.placeholder(name) for name in ("tangent", "x", "y"))
    tangent.meta["val"] = first.meta["val"] = second.meta["val"] = torch.empty(4)
    placements = {}
    value = tangent
    for saved in (first, second):
        again = graph.call_function(aten.exp.default, (saved,))
        value = graph.call_function(aten.mul.Tensor, (value, again))
        placements |= {again.name: "a", value.name: "b"}
        again.meta["val"] = value.meta["val"] = torch.empty(4)
    graph.output((value,))
    module = GraphModule(nn.Module(), graph)
    planned = [(name,) for name in placements]
    cuts = cut_regions(module, placements, (), planned)
    assert [[node.name for node in cut.nodes] for cut in cuts] == [
        ["exp_default"],
        ["mul_tensor"],
        ["exp_default_1"],
        ["mul_tensor_1"],
    ]


def test_signatures_hold_what_matters():
    """Wiring, constants, dtypes, shapes, strides, the values of constant tensors."""
    x, y = rnd(4, 4), rnd(4, 4)
    graphs = [
        traced(lambda x, y: (x + y) * 2, x, y),
        traced(lambda x, y: (x - y) * 2, x, y),
        traced(lambda x, y: (x + y) * 3, x, y),
        traced(lambda x, y: (x + y) * 2.0, x, y),
        traced(lambda x, y: (x + x) * 2, x, y),
        traced(lambda x, y: (y + x) * 2, x, y),
        traced(lambda x, y: (x + y) * 2, x.double(), y.double()),
        traced(lambda x, y: (x + y) * 2, x.t(), y),
        traced(lambda x, y: (x + y) * 2, x[:, :3], y[:, :3]),
        traced(lambda x, y: ((x + y) * 2, x + y), x, y),
    ]
    keys = [signature(graph, "eager", ()) for graph in graphs]
    assert len(set(keys)) == len(keys)
    assert signature(graphs[0], "other", ()) != keys[0]
    assert signature(graphs[0], "eager", ("backward",)) != keys[0]


def test_signatures_ignore_names():
    """Two blocks of one shape are lowered once."""
    first = traced(lambda x, y: (x + y) * 2, rnd(4, 4), rnd(4, 4))
    second = traced(lambda left, right: (left + right) * 2, rnd(4, 4), rnd(4, 4))
    assert signature(first, "eager", ()) == signature(second, "eager", ())


def test_ranks_with_a_device_each_have_the_same_graph():
    """Their devices differ in the index, which code that was compiled for one depends on."""

    def on(*devices):
        graph = traced(lambda x, y: (x + y) * 2, rnd(4, 4), rnd(4, 4))
        with FakeTensorMode():
            for node, device in zip(graph.graph.nodes, devices, strict=False):
                node.meta["val"] = torch.empty(4, 4, device=device)
        return graph

    def place(graph):
        return signature(graph, "", (), any_index=True)

    one, other, both = on("cuda:0", "cuda:0"), on("cuda:1", "cuda:1"), on("cuda:0", "cuda:1")
    assert place(one) == place(other)
    assert place(one) != place(both)
    assert place(one) != place(on("cpu", "cpu"))
    assert signature(one, "", ()) != signature(other, "", ())


CONSTANTS = {
    "strides that size 1 allows": torch.ones(1, 1, 2, dtype=torch.int32)[..., ::2],
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "expanded": torch.ones(3).expand(4, 3),
    "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
    "negated": torch.tensor([1 + 2j, 3j]).conj().imag,
    "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    "of no elements": torch.ones(0, 3),
}


@pytest.mark.parametrize("constant", CONSTANTS.values(), ids=CONSTANTS)
def test_a_constant_s_values_are_part_of_the_signature(constant):
    def of(value):
        return signature(make_fx(lambda x: x + value)(torch.ones(())), "eager", ())

    assert of(constant) == of(constant)
    if constant.numel():
        assert of(constant * 2) != of(constant)


def test_isomorphic_regions_are_lowered_once():
    """And each call of the shared code gets its own weights."""
    lowered = []

    def call(eager_call, region):
        lowered.append(region.name)
        return eager_call

    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Sigmoid()) for _ in range(4)))
    with plugged("linear", claim=claim_ops("addmm", "t"), call=call):
        fn = compiled(blocks, "linear", stages={"plan": "tests.support.plans:first_claimer"})
        with torch.no_grad():
            for _ in range(2):
                assert_same(fn(rnd(3, 6)), blocks(rnd(3, 6)))
    report = last_graph()
    assert [region.backend for region in report.regions].count("linear") == 4
    assert len(lowered) == 1
    assert sum(bool(region.same_as) for region in report.regions) == 6


# --- through the whole pipeline ------------------------------------------------------------------


def test_dropout_chains_over_two_backends():
    """The same seed gives eager's numbers, whichever backend draws which."""

    def f(x):
        for i in range(5):
            x = nn.functional.dropout(x.exp() if i % 2 else x.sigmoid(), 0.3) + torch.rand_like(x)
        return x

    for options in (ALTERNATE, SHUFFLED):
        torch._dynamo.reset()
        with plugged("other"):
            fn = compiled(f, "other", "eager", **options)
            for grad in (False, True):
                for seed in range(3):
                    results = []
                    for function in (fn, f):
                        x = rnd(9, 7).requires_grad_(grad)
                        torch.manual_seed(seed)
                        y = function(x)
                        if grad:
                            y.sum().backward()
                        results.append((y, x.grad, torch.rand(2)))
                    assert_same(*results)
    assert len(last_graph("inference").regions) > 3


class Block(nn.Module):
    """A layer norm, an attention, an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(8), nn.Linear(8, 24)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        q, k, v = self.attend(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.mlp(x)


@pytest.mark.parametrize("options", [ALTERNATE, SHUFFLED], ids=["alternate", "shuffled"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_many_regions_give_eagers_results(options, grad):
    """A block cut at nearly every node, with every check on."""
    ledger.clear()
    block, twin = Block(), Block()
    twin.load_state_dict(block.state_dict())
    with plugged("other"), plugged("third", claim=claim_ops("mm", "addmm", "bmm", "add", "mul")):
        fn = compiled(block, "other", "third", "eager", verify="always", **options)
        for call in range(2):
            results = []
            for model, function in ((block, fn), (twin, twin)):
                x = rnd(2, 5, 8, seed=call).requires_grad_(grad)
                with torch.set_grad_enabled(grad):
                    y = function(x)
                if grad:
                    y.square().sum().backward()
                results.append((y, x.grad, [p.grad for p in model.parameters()]))
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    assert not all_trips()
    kinds = ("forward", "backward") if grad else ("inference",)
    assert graph_count(*kinds) == len(kinds)
    for kind in kinds:
        assert len(last_graph(kind).regions) > 5
        assert {region.backend for region in last_graph(kind).regions} >= {"eager", "other"}


def test_every_node_is_in_the_report():
    """With its backend and a reason; nothing is placed in silence."""
    with plugged("other", claim=claim_ops("mm", "addmm")):
        fn = compiled(Block(), "other", "eager", stages=ALTERNATE["stages"])
        with torch.no_grad():
            fn(rnd(2, 5, 8))
    report = last_graph()
    ops = sum(sum(region.ops.values()) for region in report.regions)
    own = [node for node in report.nodes if node.backend == "board"]
    assert len(report.nodes) == ops + len(own)
    assert all(node.reason for node in report.nodes)
    declined = [node for node in report.nodes if node.backend == "eager"]
    assert any("another op" in node.declined.get("other", "") for node in declined)


def test_a_claimed_call_of_a_lowered_region_is_not_claimed_again():
    """Backends are asked about the graph as captured, once a graph."""
    asked = []

    def claim(graph):
        asked.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return claim_all(graph)

    with plugged("first", claim=claim), plugged("second", claim=claim):
        fn = compiled(Block(), "first", "second", "eager", **ALTERNATE)
        with torch.no_grad():
            fn(rnd(2, 5, 8))
    assert len(asked) == 2
    assert asked[0] == asked[1]
    assert all(isinstance(t, torch._ops.OpOverload) or t is operator.getitem for t in asked[0])
