"""Repeated blocks: found from the graph alone, lowered once, called with their own weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

import fuseboard
from fuseboard import BackendInfo
from fuseboard.partition.repeats import find_repeats, repeated_regions
from fuseboard.partition.stages import contraction_cycle
from tests.support.backends import all_trips, compiled, last_graph, observing, plugged
from tests.support.values import assert_same, rnd

aten = torch.ops.aten
LAYERS = 6


# --- finding them --------------------------------------------------------------------------------


class Built:
    """A graph over 64x64 tensors, node by node."""

    def __init__(self) -> None:
        self.graph = Graph()

    def input(self, name: str) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(64, 64)
        return node

    def op(self, target: object, *args: object) -> Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.empty(64, 64)
        return node

    def nodes(self, *results: Node) -> list[Node]:
        self.graph.output(results)
        GraphModule(nn.Module(), self.graph).graph.lint()
        return [node for node in self.graph.nodes if node.op == "call_function"]


def norm_and_product(built: Built, x: Node, number: int) -> Node:
    """14 nodes: a residual block whose last op but one is a matrix product."""
    h = x
    for i in range(6):
        h = built.op(aten.mul.Tensor, h, 1.0 + i)
        h = built.op(aten.sigmoid.default, h)
    h = built.op(aten.mm.default, h, built.input(f"w{number}"))
    return built.op(aten.add.Tensor, x, h)


def blocks(make, count: int = LAYERS, before: int = 3) -> list[Node]:
    built = Built()
    x = built.input("x")
    for _ in range(before):
        x = built.op(aten.tanh.default, x)
    for number in range(count):
        x = make(built, x, number)
    return built.nodes(built.op(aten.exp.default, x))


def test_the_cut_is_put_next_to_the_matrix_product():
    """Only what it reads and the residual cross, and both are in memory anyway."""
    nodes = blocks(norm_and_product)
    (repeat,) = find_repeats(nodes)
    assert [len(instance) for instance in repeat.instances] == [14] * (LAYERS - 1)
    assert {instance[0].target for instance in repeat.instances} == {aten.mm.default}
    assert repeat.fused_across == ()
    assert repeat.saved == 14 * (LAYERS - 2)


def test_blocks_without_a_matrix_product_say_what_a_cut_unfuses():
    def pointwise(built: Built, x: Node, number: int) -> Node:
        h = x
        for i in range(12):
            h = built.op(aten.mul.Tensor, h, 1.0 + i)
        return built.op(aten.add.Tensor, x, h)

    (repeat,) = find_repeats(blocks(pointwise))
    assert len(repeat.instances) >= LAYERS - 1
    assert [node.op for node in repeat.fused_across] == ["call_function"]
    assert value_of(repeat.fused_across[0]) == 64 * 64 * 4


def value_of(node: Node) -> int:
    return node.meta["val"].numel() * node.meta["val"].element_size()


def test_equal_ops_with_another_wiring_are_another_block():
    """One block adds the product to itself: labels repeat there, and the wiring doesn't."""
    odd: list[Node] = []

    def block(built: Built, x: Node, number: int) -> Node:
        result = norm_and_product(built, x, number)
        if number == 3:
            result.args = (result.args[1], result.args[1])
            odd.append(result)
        return result

    (repeat,) = find_repeats(blocks(block, count=LAYERS + 1))
    assert len(repeat.instances) >= LAYERS - 2
    assert not any(odd[0] in instance for instance in repeat.instances)


@pytest.mark.parametrize("other", [2, 1.0, True])
def test_constants_are_part_of_a_block(other):
    """1, 1.0 and True are three constants."""

    def block(built: Built, x: Node, number: int) -> Node:
        h = norm_and_product(built, x, number)
        return built.op(aten.add.Tensor, h, 1 if number % 2 else other)

    (repeat,) = find_repeats(blocks(block, count=8))
    assert {len(instance) for instance in repeat.instances} == {30}


def test_nothing_repeats():
    ops = [aten.sin.default, aten.cos.default, aten.exp.default, aten.tanh.default]

    def block(built: Built, x: Node, number: int) -> Node:
        for i in range(20):
            x = built.op(ops[(number * i + i // 3 + number) % 4], x)
        return x

    repeats = find_repeats(blocks(block, count=3))
    assert sum(repeat.saved for repeat in repeats) < 20


def test_the_instances_can_be_contracted():
    nodes = blocks(norm_and_product)
    regions = [[n.name for n in group] for r in find_repeats(nodes) for group in r.instances]
    assert contraction_cycle(nodes, regions) == []
    broken = [[nodes[0].name, nodes[2].name], [nodes[1].name, nodes[3].name]]
    assert set(contraction_cycle(nodes, broken)) >= {nodes[i].name for i in range(4)}


# --- when they are used --------------------------------------------------------------------------

SLOW = BackendInfo("slow", compiles_quickly=False)
QUICK = BackendInfo("quick", compiles_quickly=True)
EAGER = BackendInfo("eager", compiles_quickly=True)


def big(node: Node) -> None:
    node.meta["val"] = torch.empty(2048, 2048, device="meta")


@pytest.mark.parametrize(
    ("info", "mode", "large", "regions"),
    [
        (SLOW, "auto", True, LAYERS + 1),
        (SLOW, "auto", False, 0),  # small tensors: a call of a region costs more than its work
        (QUICK, "auto", True, 0),  # nothing to gain: it compiles quickly
        (QUICK, "always", False, LAYERS + 1),
        (SLOW, "always", False, LAYERS + 1),
        (SLOW, "never", True, 0),
    ],
)
def test_where_blocks_are_cut_out(info, mode, large, regions):
    nodes = blocks(norm_and_product, count=LAYERS + 2)
    if large:
        for node in nodes[0].graph.nodes:
            big(node)
    plan = {node.name: info.name for node in nodes}
    found, notes = repeated_regions(nodes, plan, [info, EAGER], mode)
    assert len(found) == regions
    if regions:
        assert notes == [f"{info.name} lowers a block of 14 nodes ×{regions} once"]
    elif info is SLOW and mode == "auto":
        (note,) = notes
        assert "slow gets its part whole" in note
        assert "repeats='always'" in note


# --- through the pipeline ------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.p = 0.0

    def forward(self, x, scale):
        h = functional.gelu(self.up(self.norm(x)) * scale).tanh().sin().exp().neg().sigmoid()
        return x + functional.dropout(self.down(h), self.p, self.training)


class Stack(nn.Module):
    """Layers between an embedding and a head, with a value that all of them read."""

    def __init__(self, layers: int = LAYERS, p: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        for layer in self.layers:
            layer.p = p
        self.head = nn.Linear(16, 5)

    def forward(self, ids):
        x = self.embed(ids)
        scale = torch.arange(32).cos()
        for layer in self.layers:
            x = layer(x, scale)
        return self.head(x)


def stack(**kwargs) -> Stack:
    torch.manual_seed(0)
    return Stack(**kwargs)


def ids(batch: int = 3) -> torch.Tensor:
    return torch.arange(batch * 7).reshape(batch, 7) % 20


def instances(kind: str = "inference") -> int:
    """The regions that share another one's code, and that one."""
    shared = [region for region in last_graph(kind).regions if region.same_as]
    return len(shared) + len({region.same_as for region in shared})


@pytest.mark.thorough
def test_a_block_is_lowered_once():
    """Whatever the number of layers, as many regions are lowered."""
    for layers in (LAYERS, 2 * LAYERS):
        torch._dynamo.reset()
        lowered = []

        def call(eager_call, region, lowered=lowered):
            lowered.append(region.name)
            return eager_call

        model = stack(layers=layers).eval()
        with plugged("fake", call=call), torch.no_grad():
            fn = compiled(model, "fake", repeats="always")
            assert_same(fn(ids()), model(ids()))
        assert len(lowered) == 3  # what comes before, the block, what comes after
        assert instances() == layers - 1
    assert not all_trips()


def test_each_instance_has_its_own_weights():
    """Also after one layer's weight changed, and for another instance of the model."""
    model, other = stack().eval(), stack().eval()
    with torch.no_grad():
        fn = compiled(model, "eager", repeats="always")
        assert_same(fn(ids()), model(ids()))
        model.layers[3].up.weight.mul_(3)
        assert_same(fn(ids()), model(ids()))
        model.layers[2].down = nn.Linear(32, 16)
        assert_same(fn(ids()), model(ids()))
        for parameter in other.parameters():
            parameter.add_(0.5)
        assert_same(compiled(other, "eager", repeats="always")(ids()), other(ids()))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_training(p):
    """Forward and backward graphs alike; the same seed drops the same elements."""
    model = stack(p=p)
    twin = copy.deepcopy(model)
    fn = compiled(model, "eager", repeats="always")
    for step in range(3):
        results = []
        for run, owner in ((fn, model), (twin, twin)):
            torch.manual_seed(step)
            out = run(ids())
            owner.zero_grad()
            out.square().sum().backward()
            results.append((out.detach(), [q.grad for q in owner.parameters()]))
        assert_same(*results)
    assert instances("forward") >= LAYERS - 2
    assert instances("backward") >= LAYERS - 2
    assert not all_trips()


@pytest.mark.thorough
def test_symbolic_sizes():
    """One lowering serves all layers and all batch sizes."""
    model = stack().eval()
    fn = compiled(model, "eager", repeats="always", dynamic=True)
    with torch.no_grad():
        for batch in (3, 5, 2):
            assert_same(fn(ids(batch)), model(ids(batch)))
    assert instances() == LAYERS - 1


def test_a_failure_in_one_instance_is_contained_in_all():
    """They share the code that failed."""

    def call(eager_call, region):
        def run(args):
            if region.name.endswith("region1") and calls:
                raise RuntimeError("out of luck")
            calls.append(region.name)
            return eager_call(args)

        return run

    calls: list[str] = []
    model = stack().eval()
    with plugged("fake", call=call), torch.no_grad():
        fn = compiled(model, "fake", repeats="always")
        assert_same(fn(ids()), model(ids()))
        assert_same(fn(ids()), model(ids()))
    assert len(all_trips()) == 1


def test_hidden_constants_are_copied_into_each_instance():
    """A tensor made of constants alone isn't an input of the blocks that read it."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

        def forward(self, x):
            ones = torch.full((32,), 1.5)
            for layer in self.layers:
                x = layer(x, ones)
            return x

    model = Shifted().eval()
    with torch.no_grad():
        assert_same(compiled(model, "eager", repeats="always")(rnd(4, 16)), model(rnd(4, 16)))
    shared = [region for region in last_graph().regions if region.same_as]
    assert shared
    assert all(region.ops.get("aten.full.default", 0) == 0 for region in shared)


@pytest.mark.thorough
def test_each_instance_is_wrapped_on_its_own():
    """A wrapper may hold what belongs to one place in the graph, such as a weight's address."""
    wrapped: list[str] = []

    def wrap(lowered, region):
        wrapped.append(region.name)
        return fuseboard.LoweredRegion(call=lambda args: lowered.call(args))

    model = stack().eval()
    with observing("wrapper", wrap=wrap), torch.no_grad():
        assert_same(compiled(model, "eager", repeats="always")(ids()), model(ids()))
    names = [region.name for region in last_graph().regions]
    assert len(names) == LAYERS + 1
    assert wrapped == names
