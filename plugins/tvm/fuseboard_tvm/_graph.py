"""From an ATen graph to values: what is computed, what is given, what comes out and how it lies."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

import fuseboard
from fuseboard_tvm import _claim, _torch_internals
from fuseboard_tvm._values import Input, Value, View, permute
from fuseboard_tvm.ops import OPS
from fuseboard_tvm.ops.externs import copied, laid_out
from fuseboard_tvm.ops.registry import DTYPES, named_arguments


@dataclass(frozen=True)
class Place:
    """How a tensor lies in another one's memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class Given:
    """An input that the code reads.

    :ivar position: among the region's placeholders; constants of the graph come after these.
    :ivar order: the axes in the order of memory, or None where they are in that order.
    """

    position: int
    order: tuple[int, ...] | None


@dataclass(frozen=True)
class Output:
    """Where an output comes from: the code's result ``computed``, the input ``given``, or neither
    (``literal``: None or a number). ``place`` is how it lies in the one or the other.
    """

    computed: int | None = None
    given: int | None = None
    place: Place | None = None
    literal: Any = None


@dataclass
class Program:
    """What a region computes.

    :ivar inputs: values in the order of ``given``.
    :ivar results: what the code returns.
    """

    inputs: list[Input] = field(default_factory=list)
    given: list[Given] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    constants: list[torch.Tensor] = field(default_factory=list)


def read(graph: GraphModule) -> Program:
    """The program of a graph whose ops are all in the op layer.

    :raises LoweringError: one isn't.
    """
    return _Reader(graph).program


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    result: list[int] = []
    stride = 1
    for size in reversed(shape):
        result.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(result))


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes of a tensor from the one with the longest steps to the shortest."""
    strides = tensor.stride()
    return tuple(
        sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], -tensor.shape[axis]))
    )


def _is_row_major(size: Sequence[int], stride: Sequence[int]) -> bool:
    pairs = zip(size, stride, strides_of(size), strict=True)
    return all(length == 1 or own == wanted for length, own, wanted in pairs)


class _Reader:
    def __init__(self, graph: GraphModule) -> None:
        self.graph = graph
        self.program = Program()
        self.values: dict[Node, Any] = {}
        self.storage: dict[Node, Node] = {}  # node → the node whose memory it views
        self.placeholders = graph.graph.find_nodes(op="placeholder")
        for position, node in enumerate(self.placeholders):
            self.enter(node, position, node.meta["val"])
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                tensor = operator.attrgetter(str(node.target))(graph)
                if not isinstance(tensor, torch.Tensor):
                    raise fuseboard.LoweringError(f"constant {node.target} isn't a tensor")
                if _torch_internals.is_fake(tensor):
                    raise fuseboard.LoweringError(f"the values of {node.target} aren't known")
                position = len(self.placeholders) + len(self.program.constants)
                self.program.constants.append(tensor)
                self.enter(node, position, tensor)
            elif node.op == "call_function":
                self.values[node] = self.emit(node)
                self.storage[node] = self.memory_of(node)
        self.outputs(graph.graph.output_node().args[0])

    # --- inputs ------------------------------------------------------------------------------

    def enter(self, node: Node, position: int, tensor: Any) -> None:
        self.storage[node] = node
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPES:
            self.values[node] = tensor
            return
        shape = tuple(int(size) for size in tensor.shape)
        order = memory_order(tensor)
        in_order = order == tuple(range(len(order))) or tensor.is_contiguous()
        stored = shape if in_order else tuple(shape[axis] for axis in order)
        value = Input(stored, DTYPES[tensor.dtype], position=len(self.program.inputs))
        self.program.inputs.append(value)
        self.program.given.append(Given(position, None if in_order else order))
        if in_order:
            self.values[node] = value
        else:
            self.values[node] = permute(value, _inverse(order))

    # --- ops ---------------------------------------------------------------------------------

    def emit(self, node: Node) -> Any:
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        op = OPS.get(node.target)
        reason = f"{node.target} isn't in the op layer" if op is None else _claim.why_not(node)
        if op is None or reason is not None:
            raise fuseboard.LoweringError(f"after decomposition, {node.name}: {reason}")
        arguments = map_arg(named_arguments(node), self.values.__getitem__)
        return op.emit(node, arguments)

    def memory_of(self, node: Node) -> Node:
        """The node whose memory a node's result lies in."""
        if node.target is operator.getitem:
            return self.storage[node.args[0]]  # type: ignore[index]
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        if returns and returns[0].alias_info is not None and node.all_input_nodes:
            return self.storage[node.all_input_nodes[0]]
        return node

    # --- outputs -----------------------------------------------------------------------------

    def outputs(self, wanted: Sequence[Any]) -> None:
        taken: dict[Value, Node] = {}
        for one in wanted:
            if not isinstance(one, Node):
                self.program.outputs.append(Output(literal=one))
                continue
            value = self.values[one]
            if not isinstance(value, Value):
                self.program.outputs.append(Output(literal=value))
                continue
            self.program.outputs.append(self.output(one, value, taken))

    def output(self, node: Node, value: Value, taken: dict[Value, Node]) -> Output:
        tensor = node.meta["val"]
        memory = self.storage[node]
        if memory.op in ("placeholder", "get_attr") and self.values[memory] is not None:
            found = self.view_of_input(memory, value, tensor)
            if found is not None:
                return found
        base, place = laid_out(value)
        size = tuple(int(one) for one in tensor.shape)
        stride = tuple(int(one) for one in tensor.stride())
        lies = (
            Place(tuple(place["size"]), tuple(place["stride"]), place["offset"])
            if place is not None
            else Place(base.shape, strides_of(base.shape))
        )
        free = not isinstance(base, Input) and taken.get(base, memory) is memory
        if free and lies.size == size and _same_strides(size, stride, lies.stride):
            taken[base] = memory
            return self.computed(base, lies)
        order = memory_order(tensor)
        ordered = copied(permute(value, order))
        inverse = _inverse(order)
        wanted = strides_of(ordered.shape)
        lies = Place(size, tuple(wanted[axis] for axis in inverse))
        if not _same_strides(size, stride, lies.stride):
            raise fuseboard.LoweringError(f"{node.name} has strides {stride} for sizes {size}")
        return self.computed(ordered, lies)

    def computed(self, value: Value, place: Place) -> Output:
        results = self.program.results
        if value not in results:
            results.append(value)
        plain = place.size == value.shape and _is_row_major(place.size, place.stride)
        return Output(
            computed=results.index(value), place=None if plain and not place.offset else place
        )

    def view_of_input(self, memory: Node, value: Value, tensor: torch.Tensor) -> Output | None:
        """An output that is a view of an input, as it is in the graph."""
        given = self.values[memory]
        steps = []
        while value is not given and isinstance(value, View):
            steps.append(value.strided)
            value = value.inputs[0]
        if value is not given or any(step is None for step in steps):
            return None
        source = memory.meta["val"] if memory.op == "placeholder" else None
        if source is None:
            return None
        with _torch_internals.real_tensors():
            size, stride = tuple(map(int, source.shape)), tuple(map(int, source.stride()))
            found = torch.empty_strided(size, stride, device="meta")
            try:
                for step in reversed(steps):
                    found = step(found)
            except (RuntimeError, ValueError):  # torch: sizes and strides don't allow a view
                return None
        if tuple(found.shape) != tuple(tensor.shape):
            return None
        if not _same_strides(found.shape, tensor.stride(), found.stride()):
            return None
        position = self.placeholders.index(memory)
        place = Place(tuple(found.shape), tuple(found.stride()), found.storage_offset())
        return Output(given=position, place=place if steps else None)


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=lambda axis: order[axis]))


def _same_strides(size: Sequence[int], wanted: Sequence[int], have: Sequence[int]) -> bool:
    return all(
        length <= 1 or want == own for length, want, own in zip(size, wanted, have, strict=True)
    )
