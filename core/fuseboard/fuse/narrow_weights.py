"""Linear layers of few rows with weights of 4 bits, in groups that have a scale each.

What such a layer takes is the time to read its weight. Inputs become bfloat16, sums are float32.
Weights are rounded when they change, not in each call. Those that were stored in 4 bits and made
floats keep all that they had but for the rounding of their scales to bfloat16; of others little is
left, which the budget finds out.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuseboard.contracts import Fusion, Narrowing
from fuseboard.fuse.narrow_integers import is_layer, is_transpose, operands
from fuseboard.fuse.reading import value_of
from fuseboard.fuse.writing import Writer
from fuseboard.ops.four_bits import GROUP, ROWS_MULTIPLE, pack_in_4_bits
from fuseboard.torch_api.formats import int4_product

aten = torch.ops.aten

#: More rows than these are multiplied faster in bfloat16 (4 of 576x1536: 0.10 ms, in bfloat16 0.16;
#: 8: both about 0.2; CPU time of one thread, Zen 4).
_MOST_ROWS = 4


def narrowing_to_int4(graph: GraphModule) -> Narrowing | None:
    """Offer a graph's linear layers with weights of 4 bits; None where none is of few rows."""
    product = int4_product()
    layers = [node for node in graph.graph.nodes if _is_small(node)] if product else []
    if not layers:
        return None
    narrower = _Narrower(graph, product)
    return Narrowing(
        "int4",
        f"weights of linear layers in groups of {GROUP}; their inputs become bfloat16",
        tuple(Fusion("int4", (node.name,), partial(narrower.narrow, node)) for node in layers),
    )


def _is_small(node: Node) -> bool:
    if not is_layer(node):
        return False
    x, weight = operands(node)
    rows = value_of(x).shape[0]  # type: ignore[union-attr]
    inner, outer = value_of(weight).shape  # type: ignore[union-attr]
    if not all(type(size) is int for size in (rows, inner, outer)):
        return False
    return 0 < rows <= _MOST_ROWS and inner % GROUP == 0 and outer % ROWS_MULTIPLE == 0 < outer


class _Narrower:
    """Rounds weights of one graph's products, and casts no input twice.

    :param product: the kernel.
    """

    def __init__(self, graph: GraphModule, product: Any) -> None:
        self._graph = graph
        self._product = product
        #: Node → what it is in bfloat16.
        self._cast: dict[Node, Node] = {}

    def narrow(self, layer: Node) -> None:
        """Let a layer multiply by what its weight is rounded to."""
        write = Writer(self._graph, layer)
        x, weight = operands(layer)
        held = weight.args[0] if is_transpose(weight) else write.function(aten.t.default, weight)
        both = write.function(pack_in_4_bits, held)
        packed, scales = (write.function(operator.getitem, both, place) for place in range(2))
        narrow = write.function(self._product, self._input(x, write), packed, GROUP, scales)
        result = write.function(aten._to_copy.default, narrow, dtype=torch.float32)
        if len(layer.args) == 3:
            result = write.function(aten.add.Tensor, result, layer.args[0])
        layer.replace_all_uses_with(result)
        self._graph.graph.erase_node(layer)

    def _input(self, x: Node, write: Writer) -> Node:
        if x not in self._cast:
            self._cast[x] = write.function(
                aten._to_copy.default,
                x,
                dtype=torch.bfloat16,
                memory_format=torch.contiguous_format,
            )
        return self._cast[x]
