"""From a region's graph to an ONNX model, and what has to be known to call it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

import fuseboard
from fuseboard_onnxruntime import _torch_internals
from fuseboard_onnxruntime._decompositions import decompose
from fuseboard_onnxruntime._dtypes import onnx_type, promote
from fuseboard_onnxruntime._layout import inverse, permutation
from fuseboard_onnxruntime._simplify import first_results
from fuseboard_onnxruntime._sizes import size_function
from fuseboard_onnxruntime._translations import translations

aten = torch.ops.aten

#: Operator set of the models: that of torch's library, whose functions are written in it.
OPSET = 18


@dataclass(frozen=True)
class Input:
    """One input of a model.

    :ivar position: among the region's inputs.
    :ivar order: the dimensions as the model wants them; None where they are as in torch.
    :ivar number: it is an int in a call, and a 0-d tensor for the model.
    """

    name: str
    position: int
    onnx_type: int
    order: tuple[int, ...] | None = None
    number: bool = False


@dataclass(frozen=True)
class Output:
    """One output of a model, or of a call.

    :ivar copy_of: it is a copy of the output of that number; the model hasn't got it.
    :ivar order: from the model's dimensions to torch's.
    :ivar shape: as the model gives it; None where it depends on symbolic sizes.
    :ivar strides: where they aren't those of a permuted row-major tensor; else None.
    :ivar passes: it is the region's input of that number, copied.
    """

    name: str = ""
    onnx_type: int = 0
    shape: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    copy_of: int | None = None
    passes: int | None = None


@dataclass(frozen=True)
class Model:
    """A converted region. It holds no weights: these are inputs, or become initializers later.

    :ivar proto: the serialised ONNX model.
    :ivar sizes: code of a function from the inputs to the outputs' shapes; "" if all are static.
    """

    proto: bytes
    inputs: tuple[Input, ...]
    outputs: tuple[Output | None, ...]
    sizes: str = ""

    def to_bytes(self) -> bytes:
        """For a cache: a line of JSON, then the proto."""
        head = {
            "inputs": [asdict(value) for value in self.inputs],
            "outputs": [value and asdict(value) for value in self.outputs],
            "sizes": self.sizes,
        }
        return json.dumps(head).encode() + b"\n" + self.proto

    @classmethod
    def from_bytes(cls, data: bytes) -> Model:
        """What :meth:`to_bytes` wrote."""
        head, _, proto = data.partition(b"\n")
        found = json.loads(head)
        return cls(
            proto,
            tuple(Input(**_tuples(value)) for value in found["inputs"]),
            tuple(value and Output(**_tuples(value)) for value in found["outputs"]),
            found["sizes"],
        )


def _tuples(value: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}


def convert(graph: GraphModule, checked: bool = True) -> Model:
    """An ONNX model of a region's graph.

    :param graph: it isn't changed.
    :raises LoweringError: something in it has no ONNX form here.
    """
    given = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    results = graph.graph.output_node().args[0]
    expected = [node.meta["val"] if isinstance(node, Node) else None for node in results]
    graph = copied(graph)
    first_results(graph.graph)
    graph = decompose(graph)
    plain, inputs = _row_major(graph, expected)
    promote(plain)
    outputs, sizes = _describe_outputs(plain, given, expected)
    plain.graph.eliminate_dead_code()
    for value, node in zip(list(inputs), plain.graph.find_nodes(op="placeholder"), strict=True):
        if not node.users:
            plain.graph.erase_node(node)
            inputs.remove(value)
    plain.recompile()
    if not plain.graph.output_node().args[0]:
        return Model(b"", tuple(inputs), tuple(outputs))  # nothing is computed
    try:
        model = _torch_internals.translate(plain, translations(), OPSET)
    except Exception as error:  # torch's exporter raises its own, with causes
        raise fuseboard.LoweringError(f"no ONNX form: {_innermost(error)}") from error
    names = [value.name for value in model.graph.inputs]
    inputs = [_named(value, name) for value, name in zip(inputs, names, strict=True)]
    outputs = _named_outputs(outputs, [value.name for value in model.graph.outputs])
    return Model(_serialise(model, checked), tuple(inputs), tuple(outputs), sizes)


def copied(graph: GraphModule) -> GraphModule:
    """A graph of one's own."""
    new = Graph()
    new.output(new.graph_copy(graph.graph, {}))
    return GraphModule(graph, new)


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _serialise(model: Any, checked: bool) -> bytes:
    import onnx
    import onnx_ir as ir

    for node in model.graph:
        if node.op_type == "LayerNormalization":
            _drop_statistics(node)
    proto = ir.to_proto(model)
    if checked:
        onnx.checker.check_model(proto)
    return bytes(proto.SerializeToString())


def _drop_statistics(node: Any) -> None:
    """ONNX Runtime fuses a layer norm to the addition before it only if it has one result."""
    if not any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        node.resize_outputs(1)


# --- inputs and outputs ---------------------------------------------------------------------------


def _row_major(graph: GraphModule, expected: Sequence[Any]) -> tuple[GraphModule, list[Input]]:
    """A copy of the graph whose inputs and outputs are row-major, with permutations inside."""
    new = Graph()
    nodes: dict[Node, Node] = {}
    inputs: list[Input] = []
    permuted: list[tuple[Node, Node, tuple[int, ...]]] = []
    for node in graph.graph.nodes:
        if node.op == "output":
            break
        nodes[node] = new.node_copy(node, nodes.__getitem__)
        nodes[node].meta = dict(node.meta)
        if node.op == "placeholder":
            inputs.append(_input(node, len(inputs)))
            order = inputs[-1].order
            if order is not None:
                permuted.append((node, nodes[node], order))
    first = next((node for node in new.nodes if node.op != "placeholder"), None)
    for _, placeholder, order in permuted:
        value = placeholder.meta["val"]
        with new.inserting_before(first) if first is not None else new.inserting_after():
            back = new.call_function(aten.permute.default, (placeholder, list(inverse(order))))
        back.meta["val"] = value
        placeholder.meta["val"] = value.permute(order)
        placeholder.replace_all_uses_with(back, delete_user_cb=lambda user, b=back: user is not b)
        nodes.update({old: back for old, made in nodes.items() if made is placeholder})
    results = []
    for node, value in zip(graph.graph.output_node().args[0], expected, strict=True):
        result = nodes[node] if isinstance(node, Node) else None
        order = permutation(value) if isinstance(value, torch.Tensor) else None
        if result is not None and order is not None and order != tuple(range(len(order))):
            result = new.call_function(aten.permute.default, (result, list(order)))
            result.meta["val"] = value.permute(order)
        results.append(result)
    new.output(tuple(results))
    return GraphModule(graph, new), inputs


def _input(node: Node, position: int) -> Input:
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        order = permutation(value)
        moved = order is not None and order != tuple(range(value.dim()))
        return Input("", position, onnx_type(value.dtype), order if moved else None)
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return Input("", position, onnx_type(torch.int64), number=True)
    raise fuseboard.LoweringError(f"input {node.name} is a {type(value).__name__}")


def _named(value: Input, name: str) -> Input:
    return Input(name, value.position, value.onnx_type, value.order, value.number)


def _describe_outputs(
    graph: GraphModule, given: Sequence[Any], expected: Sequence[Any]
) -> tuple[list[Output | None], str]:
    """What each output of a call is; the graph is left with those that a model computes."""
    output = graph.graph.output_node()
    placeholders = graph.graph.find_nodes(op="placeholder")
    described: list[Output | None] = []
    first: dict[Node, int] = {}
    kept: list[Node] = []
    shapes: list[Any] = []
    dynamic = False
    for number, (node, value) in enumerate(zip(output.args[0], expected, strict=True)):
        if node is None:
            described.append(None)
            continue
        if not isinstance(value, torch.Tensor):
            raise fuseboard.LoweringError(f"output {number} is a {type(value).__name__}")
        order = permutation(value)
        strides = None
        if order is None:
            strides = tuple(map(_known, value.stride()))
        order = None if order is None or order == tuple(range(len(order))) else order
        back = None if order is None else inverse(order)
        if node in first:
            described.append(Output(copy_of=first[node], order=back, strides=strides))
            continue
        if node in placeholders:
            described.append(Output(passes=placeholders.index(node), order=back, strides=strides))
            continue
        first[node] = number
        kept.append(node)
        shape = node.meta["val"].shape
        static = all(isinstance(size, int) for size in shape)
        dynamic = dynamic or not static
        shapes.append(shape)
        shape = tuple(shape) if static else None
        described.append(Output("", onnx_type(value.dtype), shape, back, strides))
    output.args = (tuple(kept),)
    return described, size_function(given, shapes) if dynamic else ""


def _known(stride: Any) -> int:
    if isinstance(stride, int):
        return stride
    raise fuseboard.LoweringError("an output has symbolic strides that aren't a dense tensor's")


def _named_outputs(outputs: Sequence[Output | None], names: Sequence[str]) -> list[Output | None]:
    import dataclasses

    given = iter(names)
    return [
        dataclasses.replace(value, name=next(given))
        if value is not None and value.copy_of is None and value.passes is None
        else value
        for value in outputs
    ]
