"""Random ATen graphs as the partitioner gets them: a recipe, and the graph that it makes.

A recipe is a list of steps that read earlier values. A block of steps can be repeated, each time
with a weight of its own, as layers are. Fake values come from running each op under a fake mode,
with the number of rows fixed or symbolic.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from tests.support.values import rnd

aten = torch.ops.aten

#: Rows of every value when traced; symbolic graphs are run with others as well.
ROWS, WIDTH = 5, 4

#: A step: what to do, and the numbers of the values that it reads (modulo how many there are).
Step = tuple[str, int, int]

_UNARY = {
    "relu": aten.relu.default,
    "neg": aten.neg.default,
    "abs": aten.abs.default,
    "clone": aten.clone.default,
    "detach": aten.detach.default,
}
_BINARY = {
    "add": aten.add.Tensor,
    "mul": aten.mul.Tensor,
    "maximum": aten.maximum.default,
}
STEPS = (
    *_UNARY,
    *_BINARY,
    *("view", "transpose", "narrow", "flat", "full", "scalar", "size"),
    *("var_mean", "one_item", "split", "cat"),
    *("rand", "bernoulli", "dropout", "logged"),
)

_logged: list[int] = []
_library = torch.library.Library("fuseboard_tests", "FRAGMENT")
_library.define("logged(Tensor x, int number) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def _log(x: torch.Tensor, number: int) -> torch.Tensor:
    _logged.append(number)
    return x.clone()


_library.impl("logged", _log, "CPU")
_library.impl("logged", lambda x, number: torch.empty_like(x), "Meta")


@contextmanager
def logged() -> Iterator[list[int]]:
    """The numbers of the calls of ``fuseboard_tests.logged``, an op with an effect, in order."""
    _logged.clear()
    yield _logged
    _logged.clear()


@dataclass(frozen=True)
class Recipe:
    """A graph to make.

    :ivar block: steps that are done ``repeats`` times, on the block's input and a weight.
    :ivar outputs: numbers of values; -1 is None, -2 the number of rows.
    """

    before: tuple[Step, ...]
    block: tuple[Step, ...]
    repeats: int
    after: tuple[Step, ...]
    outputs: tuple[int, ...]
    symbolic: bool

    def make(self) -> GraphModule:
        return _Maker(self.symbolic).run(self)


class _Maker:
    def __init__(self, symbolic: bool) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.rows: Any = ROWS
        self.numbered = 0
        if symbolic:
            context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
            example = self.mode.from_tensor(torch.empty(ROWS), symbolic_context=context)
            self.rows = self.graph.placeholder("rows")
            self.rows.meta["val"] = example.shape[0]

    def run(self, recipe: Recipe) -> GraphModule:
        size = self.rows.meta["val"] if isinstance(self.rows, Node) else self.rows
        x = self.input("x", size, WIDTH)
        y = self.input("y", size, WIDTH)
        self.factor = self.input("factor")  # a scalar on the CPU, as optimizers have them
        weights = [self.input(f"weight{i}", WIDTH) for i in range(recipe.repeats)]
        self.first = x
        values = [x, y]
        for step in recipe.before:
            values.append(self.step(step, values))
        for weight in weights:
            local = [values[-1], self.op(aten.mul.Tensor, values[-1], weight)]
            for step in recipe.block:
                local.append(self.step(step, local))
            values.append(local[-1])
        for step in recipe.after:
            values.append(self.step(step, values))
        special = {-1: None, -2: self.rows}
        results = [special[n] if n in special else values[n % len(values)] for n in recipe.outputs]
        self.graph.output(tuple(results))
        self.graph.lint()
        return GraphModule(nn.Module(), self.graph)

    def input(self, name: str, *shape: Any) -> Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def op(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        values = torch.fx.map_arg((args, kwargs), lambda used: used.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def step(self, step: Step, values: list[Node]) -> Node:
        """One step: a node of shape (rows, WIDTH)."""
        name, first, second = step
        x, y = values[first % len(values)], values[second % len(values)]
        if name in _UNARY:
            return self.op(_UNARY[name], x)
        if name in _BINARY:
            return self.op(_BINARY[name], x, y)
        return getattr(self, f"_{name}")(x, y)  # type: ignore[no-any-return]

    # --- steps of several ops -------------------------------------------------------------------

    def _view(self, x: Node, y: Node) -> Node:
        return self.op(aten.view.default, self._clone(x), [self.rows, WIDTH])

    def _clone(self, x: Node) -> Node:
        return self.op(aten.clone.default, x, memory_format=torch.contiguous_format)

    def _transpose(self, x: Node, y: Node) -> Node:
        turned = self.op(aten.neg.default, self.op(aten.t.default, x))
        return self.op(aten.t.default, turned)

    def _narrow(self, x: Node, y: Node) -> Node:
        """A view of everything, and of a part that is added to it."""
        whole = self.op(aten.slice.Tensor, x, 1, 0, WIDTH)
        column = self.op(aten.slice.Tensor, x, 1, 1, 2)
        return self.op(aten.add.Tensor, whole, column)

    def _flat(self, x: Node, y: Node) -> Node:
        """Through one dimension, whose size is computed where it is symbolic."""
        size = self.op(operator.mul, self.rows, WIDTH) if isinstance(self.rows, Node) else -1
        flat = self.op(aten.view.default, self._clone(x), [size])
        back = self.op(aten.view.default, self.op(aten.relu.default, flat), [self.rows, WIDTH])
        return self.op(aten.add.Tensor, back, y)

    def _full(self, x: Node, y: Node) -> Node:
        """An op that reads no tensor."""
        return self.op(aten.full.default, [self.rows, WIDTH], 0.5, pin_memory=False)

    def _scalar(self, x: Node, y: Node) -> Node:
        return self.op(aten.mul.Tensor, x, self.factor)

    def _size(self, x: Node, y: Node) -> Node:
        """Times the number of rows, read from an input where it is symbolic."""
        if not isinstance(self.rows, Node):
            return self.op(aten.mul.Tensor, x, self.rows)
        return self.op(aten.mul.Tensor, x, self.op(aten.sym_size.int, self.first, 0))

    def _var_mean(self, x: Node, y: Node) -> Node:
        both = self.op(aten.var_mean.correction, x, [1], correction=1, keepdim=True)
        variance, mean = (self.op(operator.getitem, both, i) for i in (0, 1))
        return self.op(aten.add.Tensor, self.op(aten.sub.Tensor, y, mean), variance)

    def _one_item(self, x: Node, y: Node) -> Node:
        both = self.op(aten.var_mean.correction, x, [1], correction=1, keepdim=True)
        return self.op(aten.add.Tensor, y, self.op(operator.getitem, both, 1))

    def _split(self, x: Node, y: Node) -> Node:
        """Items that are views of one tensor."""
        parts = self.op(aten.split.Tensor, x, 2, 1)
        left, right = (self.op(operator.getitem, parts, i) for i in (0, 1))
        return self.op(aten.cat.default, [right, self.op(aten.neg.default, left)], 1)

    def _cat(self, x: Node, y: Node) -> Node:
        both = self.op(aten.cat.default, [x, y], 1)
        return self.op(aten.slice.Tensor, both, 1, 2, 2 + WIDTH)

    def _rand(self, x: Node, y: Node) -> Node:
        return self.op(aten.rand_like.default, x)

    def _bernoulli(self, x: Node, y: Node) -> Node:
        return self.op(aten.bernoulli.p, x, 0.5)

    def _dropout(self, x: Node, y: Node) -> Node:
        both = self.op(aten.native_dropout.default, x, 0.5, True)
        return self.op(operator.getitem, both, 0)

    def _logged(self, x: Node, y: Node) -> Node:
        self.numbered += 1
        return self.op(torch.ops.fuseboard_tests.logged.default, x, self.numbered)


def inputs_for(graph: GraphModule, rows: int = ROWS) -> list[Any]:
    """Real inputs in the order of the placeholders."""
    made: list[Any] = []
    for number, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            made.append(rows)
        else:
            sizes = [rows if isinstance(size, torch.SymInt) else size for size in value.shape]
            made.append(rnd(*sizes, seed=number))
    return made


@st.composite
def recipes(draw: Any, symbolic: bool | None = None) -> Recipe:
    """Recipes of up to three parts; half of them symbolic, unless said."""
    step = st.tuples(st.sampled_from(STEPS), st.integers(0, 7), st.integers(0, 7))
    steps = st.lists(step, max_size=6).map(tuple)
    return Recipe(
        before=draw(steps),
        block=draw(steps),
        repeats=draw(st.integers(0, 4)),
        after=draw(steps),
        outputs=tuple(draw(st.lists(st.integers(-2, 9), min_size=1, max_size=4))),
        symbolic=draw(st.booleans()) if symbolic is None else symbolic,
    )
