"""The compiler: a region's nodes as a list of NumPy calls."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from fuseboard import LoweredRegion, Region
from fuseboard_mychip import FUNCTIONS


def lower_region(region: Region) -> LoweredRegion:
    """Compile a region.

    Values live in numbered slots: first the inputs, then the graph's constants, then one for each
    op. What the board expects of the callable: it takes one list, which it may empty, writes to
    none of its inputs, and returns outputs with the sizes, dtypes and strides of ``meta["val"]``.
    """
    graph = region.graph.graph
    constant_nodes = graph.find_nodes(op="get_attr")
    leading = [*graph.find_nodes(op="placeholder"), *constant_nodes]
    slots: dict[Node, int] = {node: i for i, node in enumerate(leading)}
    constants = [operator.attrgetter(node.target)(region.graph) for node in constant_nodes]
    steps: list[tuple[Any, list[Any], torch.Size, tuple[int, ...], torch.dtype]] = []
    outputs: list[int] = []
    for node in graph.nodes:
        if node.op == "output":
            outputs = [slots[value] for value in node.args[0]]
        elif node.op == "call_function":
            slots[node] = len(slots)
            # An operand is a slot's number, or a Python float: NumPy 2 lets those take the
            # arrays' dtype, as torch does.
            operands = [slots[a] if isinstance(a, Node) else float(a) for a in node.args]
            value = node.meta["val"]
            function = getattr(np, FUNCTIONS[node.target])
            steps.append((function, operands, value.size(), value.stride(), value.dtype))

    def call(args: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        tensors = [*args, *constants]
        args.clear()
        # force: parameters require grad, which .numpy() refuses.
        arrays = [tensor.numpy(force=True) for tensor in tensors]
        with np.errstate(all="ignore"):  # torch doesn't warn of log(-1) or an overflow either
            for function, operands, size, stride, dtype in steps:
                result = torch.empty_strided(size, stride, dtype=dtype)
                array = result.numpy()  # shares result's memory
                function(*[arrays[o] if isinstance(o, int) else o for o in operands], out=array)
                tensors.append(result)
                arrays.append(array)
        return tuple(tensors[slot] for slot in outputs)

    return LoweredRegion(call=call, notes=(f"{len(steps)} NumPy calls",))
