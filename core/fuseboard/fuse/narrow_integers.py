"""Linear layers in integers of 8 bits, as PT2E would write them for a model quantised dynamically.

What goes into a layer is rounded to as many steps as a byte has, between its smallest and its
largest element of the call; a weight is, for each output by itself, between its largest element
and minus that. Sums of products are exact, results are float32 again, and so is all between.
Weights are rounded when they change, not in each call.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.contracts import Fusion, Narrowing
from fuseboard.fuse.reading import dtype_of, value_of
from fuseboard.fuse.writing import Writer
from fuseboard.torch_api.formats import cuts_off_int8_sums
from fuseboard.torch_api.quantised_ops import quantised_ops

aten = torch.ops.aten

#: What goes into a layer, and its weight (in, out), are the last arguments.
_LINEAR = (aten.mm.default, aten.addmm.default)
#: Views of all elements, in their order.
_RESHAPES = (aten.view.default, aten._unsafe_view.default)

#: The smallest step.
_EPS = torch.finfo(torch.float32).eps
_LARGEST_WEIGHT = 127


def narrowing_to_int8(graph: GraphModule) -> Narrowing | None:
    """Offer a graph's linear layers in int8; None where it has none, or isn't on the CPU."""
    layers = [node for node in graph.graph.nodes if is_layer(node)]
    if not layers or quantised_ops() is None:
        return None
    whole = not cuts_off_int8_sums()
    narrower = _Narrower(graph, 255 if whole else 127)
    steps = "256 steps" if whole else "128 steps, since the CPU can't add products of more"
    return Narrowing(
        "int8",
        f"inputs of linear layers by tensor, to {steps}; their weights by output",
        tuple(Fusion("int8", (node.name,), partial(narrower.narrow, node)) for node in layers),
    )


def is_layer(node: Node) -> bool:
    """Whether a node multiplies float32 by an input of the graph, which a weight is."""
    if node.op != "call_function" or node.target not in _LINEAR or node.kwargs:
        return False
    x, weight = operands(node)
    held: Any = weight.args[0] if is_transpose(weight) else weight
    if held.op != "placeholder" or dtype_of(x) != torch.float32 or dtype_of(held) != torch.float32:
        return False
    return value_of(held).device.type == "cpu"  # type: ignore[union-attr]


def operands(node: Node) -> tuple[Node, Node]:
    """What goes into a layer, and its weight (in, out)."""
    x, weight = node.args[-2:]
    return x, weight  # type: ignore[return-value]


def is_transpose(node: Node) -> bool:
    """Whether a node is the transpose of what it reads."""
    return node.target is aten.t.default or (
        node.target is aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    )


class _Narrower:
    """Rounds operands of one graph's products, and nothing twice.

    :param largest: of the integers that inputs of layers become.
    """

    def __init__(self, graph: GraphModule, largest: int) -> None:
        self._graph = graph
        self._largest = largest
        #: Node → what it is once it was rounded.
        self._rounded: dict[Node, Node] = {}

    def narrow(self, layer: Node) -> None:
        """Let a layer read what its input and its weight are rounded to."""
        write = Writer(self._graph, layer)
        x, weight = operands(layer)
        args = (*layer.args[:-2], self._input(x, write), self._weight(weight, write))
        layer.replace_all_uses_with(write.function(layer.target, *args))
        self._graph.graph.erase_node(layer)

    def _input(self, x: Node, write: Writer) -> Node:
        if x not in self._rounded:
            self._rounded[x] = (
                write.function(x.target, self._input(x.args[0], write), *x.args[1:])  # type: ignore[arg-type]
                if x.target in _RESHAPES
                else self._round_input(x, write)
            )
        return self._rounded[x]

    def _round_input(self, x: Node, write: Writer) -> Node:
        ops, grid = quantised_ops(), (0, self._largest, torch.uint8)
        chosen = write.function(ops.choose_qparams.tensor, x, *grid[:2], _EPS, torch.uint8)
        scale, zero = (write.function(operator.getitem, chosen, place) for place in range(2))
        held = write.function(ops.quantize_per_tensor.tensor, x, scale, zero, *grid)
        return write.function(ops.dequantize_per_tensor.tensor, held, scale, zero, *grid)

    def _weight(self, weight: Node, write: Writer) -> Node:
        """A weight (in, out), rounded as its transpose."""
        if weight not in self._rounded:
            turned = is_transpose(weight)
            held = weight.args[0] if turned else write.function(aten.t.default, weight)
            rounded = self._round_weight(held, write)
            self._rounded[weight] = write.function(aten.t.default, rounded)
        return self._rounded[weight]

    def _round_weight(self, held: Any, write: Writer) -> Node:
        ops, grid = quantised_ops(), (0, -_LARGEST_WEIGHT, _LARGEST_WEIGHT, torch.int8)
        largest = write.function(aten.amax.default, write.function(aten.abs.default, held), [1])
        steps = write.function(aten.div.Tensor, largest, float(_LARGEST_WEIGHT))
        scales = write.function(aten.clamp_min.default, steps, _EPS)
        zeros = write.function(aten.zeros_like.default, scales, dtype=torch.int64)
        rounded = write.function(ops.quantize_per_channel.default, held, scales, zeros, *grid)
        return write.function(ops.dequantize_per_channel.default, rounded, scales, zeros, *grid)
