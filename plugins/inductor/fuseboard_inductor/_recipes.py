"""How constants are made of weights: written down while freezing, followed for any weights.

Read against torch 2.13: ``torch/_inductor/constant_folding.py`` (``replace_node_with_constant``),
``torch/fx/graph.py`` (``Graph.erase_node``), ``torch/fx/graph_module.py``.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from fuseboard import LoweringError


@dataclass(frozen=True)
class Value:
    """In the arguments of a step: a weight, a constant of the graph's own, or what a step made."""

    number: int


@dataclass(frozen=True)
class Step:
    """One call. ``made`` is the value that comes of it.

    :ivar function: an op by its name, since ops can't be pickled; or another function.
    """

    function: Any
    args: Any
    kwargs: Any
    made: Value


@dataclass
class Recipe:
    """
    :ivar weights: their values' numbers run from 0.
    :ivar own: constants that the graph had before; their values.
    :ivar results: name of a constant in the frozen graph → its value.
    """

    weights: int
    own: dict[Value, torch.Tensor] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    results: dict[str, Value] = field(default_factory=dict)

    def only(self, names: Iterable[str]) -> Recipe:
        """What it takes to make the constants of these names.

        :raises LoweringError: it isn't known how one of them is made.
        """
        if unknown := sorted(set(names) - self.results.keys()):
            raise LoweringError(f"it isn't known how Inductor made its constant {unknown[0]!r}")
        results = {name: self.results[name] for name in names}
        needed, steps = set(results.values()), []
        for step in reversed(self.steps):
            if step.made in needed:
                steps.append(step)
                needed.update(_values_in(step))
        own = {value: tensor for value, tensor in self.own.items() if value in needed}
        return Recipe(self.weights, own, steps[::-1], results)

    def follow(self, weights: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The constants of these weights. What only leads to them is let go on the way."""
        held: dict[Value, Any] = {Value(i): weight for i, weight in enumerate(weights)} | self.own
        uses = Counter(self.results.values())
        for step in self.steps:
            uses.update(_values_in(step))
        for step in self.steps:
            function = _function(step.function)
            args, kwargs = tree_map_only(Value, held.__getitem__, (step.args, step.kwargs))
            held[step.made] = function(*args, **kwargs)
            for value in _values_in(step):
                uses[value] -= 1
                if not uses[value]:
                    del held[value]
        return {name: held[value] for name, value in self.results.items()}


@contextmanager
def recording(graph: GraphModule) -> Iterator[Recipe]:
    """Write down how each node came about that becomes a constant during the block.

    The first ones are inputs, which are the weights. ``replace_node_with_constant`` puts the new
    node before the old one, erases the old one, and only then gives the module the new constant.

    :raises LoweringError: this version of torch has no hook to tell.
    """
    recipe = Recipe(0)

    def erased(node: Node) -> None:
        new = node.prev
        if new.op != "get_attr" or hasattr(graph, str(new.target)):
            return
        if node.op == "placeholder":
            value = Value(recipe.weights)
            recipe.weights += 1
        else:
            value = _write_down(recipe, graph, node, {})
        recipe.results[str(new.target)] = value

    register = getattr(graph, "_register_erase_node_hook", None)
    if register is None:
        raise LoweringError("this version of torch doesn't tell which nodes become constants")
    register(erased)
    try:
        yield recipe
    finally:
        graph._unregister_erase_node_hook(erased)


def _write_down(recipe: Recipe, graph: GraphModule, node: Node, known: dict[Node, Value]) -> Value:
    """The steps to a node's value.

    :param known: of this value only, since passes may change nodes between one and the next.
    """
    if node in known:
        return known[node]
    if node.op == "get_attr":
        value = recipe.results.get(str(node.target))
        if value is None:
            value = Value(-1 - len(recipe.own))
            recipe.own[value] = getattr(graph, str(node.target))
    elif node.op == "call_function":

        def value_of(used: Node) -> Any:
            return _write_down(recipe, graph, used, known)

        args, kwargs = map_arg((node.args, node.kwargs), value_of)
        value = Value(recipe.weights + len(recipe.steps))
        recipe.steps.append(Step(_name(node.target), args, kwargs, value))
    else:
        raise LoweringError(f"Inductor made a constant of {node.format_node()}")
    known[node] = value
    return value


def _values_in(step: Step) -> set[Value]:
    return {leaf for leaf in tree_leaves((step.args, step.kwargs)) if isinstance(leaf, Value)}


def _name(target: Any) -> Any:
    known = torch._ops.OpOverload | torch._ops.OpOverloadPacket
    return str(target) if isinstance(target, known) else target


def _function(name: Any) -> Any:
    return operator.attrgetter(name)(torch.ops) if isinstance(name, str) else name
