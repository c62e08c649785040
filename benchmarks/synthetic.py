"""Made-up graphs of any size, with fake values: what the partitioner is timed on. Needs torch."""

from __future__ import annotations

import operator
import random
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten

ROWS, WIDTH = 128, 64
#: An op of a random graph reads one of so many values before it: models are deep, not bushy.
REACH = 50
#: A random graph has one weight for so many ops.
OPS_PER_WEIGHT = 20

_UNARY = (aten.relu.default, aten.neg.default, aten.tanh.default, aten.sigmoid.default)
_BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.maximum.default)


class _Builder:
    """Writes nodes with fake values of the shapes that the ops have."""

    def __init__(self) -> None:
        self.graph = Graph()
        self._mode = FakeTensorMode()

    def value(self, *shape: int) -> Any:
        with self._mode:
            return torch.empty(shape)

    def input(self, name: str, *shape: int) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.value(*shape)
        return node

    def op(self, target: Any, *args: Any, shape: tuple[int, ...] = (ROWS, WIDTH)) -> Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = self.value(*shape)
        return node

    def normalised(self, x: Node) -> Node:
        """The mean subtracted: an op with two results, of which both are used."""
        moments = self.graph.call_function(aten.var_mean.dim, (x, [1]), {"keepdim": True})
        moments.meta["val"] = (self.value(ROWS, 1), self.value(ROWS, 1))
        variance, mean = (self.op(operator.getitem, moments, i, shape=(ROWS, 1)) for i in (0, 1))
        return self.op(aten.mul.Tensor, self.op(aten.sub.Tensor, x, mean), variance)

    def linear(self, x: Node, weight: Node) -> Node:
        """(ROWS, WIDTH) times the transpose of a (WIDTH, WIDTH) weight."""
        transposed = self.op(aten.t.default, weight, shape=(WIDTH, WIDTH))
        return self.op(aten.mm.default, x, transposed)

    def done(self, *results: Node) -> GraphModule:
        self.graph.output(results)
        return GraphModule(nn.Module(), self.graph)


def random_graph(nodes: int, seed: int = 0) -> GraphModule:
    """A random DAG of at least ``nodes`` ops: pointwise ops, views, products, tuples, draws."""
    chance = random.Random(seed)
    build = _Builder()
    weights = [build.input(f"weight{i}", WIDTH, WIDTH) for i in range(1 + nodes // OPS_PER_WEIGHT)]
    values = [build.input("x", ROWS, WIDTH)]
    unused = iter(weights)
    while len(build.graph.nodes) < nodes + len(weights):
        x, y = (chance.choice(values[-REACH:]) for _ in range(2))
        kind = chance.random()
        if kind < 0.4:
            made = build.op(chance.choice(_UNARY), x)
        elif kind < 0.8:
            made = build.op(chance.choice(_BINARY), x, y)
        elif kind < 0.9:
            made = build.linear(x, next(unused, weights[0]))
        elif kind < 0.98:
            made = build.normalised(x)
        else:
            made = build.op(aten.rand_like.default, x)
        values.append(made)
    return build.done(*values[-5:])


def layered_graph(nodes: int) -> GraphModule:
    """Equal blocks with weights of their own, one after another: what repeats are looked for in."""
    build = _Builder()
    x = build.input("x", ROWS, WIDTH)
    inputs, ops = 1, 0
    while ops < nodes:
        names = [f"block{inputs}_{part}" for part in ("q", "k", "v", "out", "up", "down")]
        weights = [build.input(name, WIDTH, WIDTH) for name in names]
        inputs += len(weights)
        x = _block(build, x, weights)
        ops = len(build.graph.nodes) - inputs
    return build.done(x)


def _block(build: _Builder, x: Node, weights: list[Node]) -> Node:
    """About 40 ops, in the shape of a transformer's layer."""
    normal = build.normalised(x)
    query, key, value = (build.linear(normal, weight) for weight in weights[:3])
    turned = build.op(aten.t.default, key, shape=(WIDTH, ROWS))
    scores = build.op(aten.mm.default, query, turned, shape=(ROWS, ROWS))
    scores = build.op(aten.mul.Tensor, scores, 0.125, shape=(ROWS, ROWS))
    shares = build.op(aten._softmax.default, scores, -1, False, shape=(ROWS, ROWS))
    attended = build.op(aten.mm.default, shares, value)
    x = build.op(aten.add.Tensor, x, build.linear(attended, weights[3]))
    up = build.linear(build.normalised(x), weights[4])
    active = build.op(aten.mul.Tensor, up, build.op(aten.sigmoid.default, up))
    return build.op(aten.add.Tensor, x, build.linear(active, weights[5]))
