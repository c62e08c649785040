"""From a region's graph to an ONNX model."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

import fuseboard
from fuseboard_onnxruntime import _torch_internals
from fuseboard_onnxruntime._clean import clean
from fuseboard_onnxruntime._decompositions import decompose
from fuseboard_onnxruntime._dtypes import TORCH_TYPES, onnx_type, promote
from fuseboard_onnxruntime._forms import why_no_form
from fuseboard_onnxruntime._layout import inverse, permutation
from fuseboard_onnxruntime._model import Input, Model, Output
from fuseboard_onnxruntime._quantised import integer_products
from fuseboard_onnxruntime._simplify import first_results, pools_without_indices
from fuseboard_onnxruntime._sizes import size_function
from fuseboard_onnxruntime._translations import translations

aten = torch.ops.aten

#: Operator set of the models: that of torch's library, whose functions are written in it.
OPSET = 18


def convert(graph: GraphModule, permuted: bool = True) -> Model:
    """An ONNX model of a region's graph.

    :param graph: it isn't changed.
    :param permuted: tensors that lie in another order of dimensions come and go in that order. If
        not, dimensions are torch's, whatever the strides.
    :raises LoweringError: something in it has no ONNX form here.
    """
    given = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    results = graph.graph.output_node().args[0]
    expected = [node.meta["val"] if isinstance(node, Node) else None for node in results]
    graph = GraphModule(graph, _nodes_of(graph))
    notes = (*first_results(graph), *integer_products(graph))
    graph = decompose(graph)
    graph.graph.eliminate_dead_code()  # a second trace has all results of an op, read or not
    pools_without_indices(graph.graph)
    plain, inputs = _row_major(graph, expected, permuted)
    promote(plain)
    outputs, sizes = _describe_outputs(plain, given, expected, permuted)
    plain.graph.eliminate_dead_code()
    for value, node in zip(list(inputs), plain.graph.find_nodes(op="placeholder"), strict=True):
        if not node.users:
            plain.graph.erase_node(node)
            inputs.remove(value)
    plain.recompile()
    for reason in filter(None, map(why_no_form, plain.graph.nodes)):
        raise fuseboard.LoweringError(reason)
    for node in plain.graph.nodes:  # torch's exporter takes such a number to be float32
        if isinstance(node.meta.get("val"), torch.SymFloat):
            node.meta["val"] = torch.zeros((), dtype=torch.float64, device="cpu")
    if not plain.graph.output_node().args[0]:
        return Model(b"", tuple(inputs), tuple(outputs), sizes)  # nothing is computed
    try:
        model = _torch_internals.translate(plain, translations(), OPSET)
    except fuseboard.LoweringError:
        raise
    except Exception as error:  # torch's exporter raises its own, with causes
        raise fuseboard.LoweringError(f"no ONNX form: {_innermost(error)}") from error
    clean(model.graph)
    # What an op takes nothing but the shape of is read by nothing once sizes are numbers, and
    # ONNX Runtime drops such an initializer before it is given its value.
    values = list(zip(inputs, model.graph.inputs, strict=True))
    inputs = [_named(one, value.name) for one, value in values if value.uses()]
    for _, value in values:
        if not value.uses():
            model.graph.inputs.remove(value)
    outputs = _named_outputs(outputs, [value.name for value in model.graph.outputs])
    return Model(_serialise(model), tuple(inputs), tuple(outputs), sizes, notes)


def with_initializers(model: Model, positions: Collection[int]) -> Model:
    """The model with some inputs as initializers whose data is said to be elsewhere.

    For sessions: it says no more of where in the user's code its nodes come from.

    :param positions: among the region's inputs, of such as have plain sizes.
    """
    import onnx

    if not model.proto:
        return model
    proto = onnx.ModelProto.FromString(model.proto)
    for node in proto.graph.node:  # lines of the user's code: nine tenths of what is parsed
        del node.metadata_props[:]
    inputs = {value.name: value for value in proto.graph.input}
    for spec in model.inputs:
        if spec.position not in positions:
            continue
        given = inputs[spec.name]
        tensor = proto.graph.initializer.add()
        tensor.name = spec.name
        tensor.data_type = spec.onnx_type
        tensor.dims.extend(dim.dim_value for dim in given.type.tensor_type.shape.dim)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        length = math.prod(tensor.dims) * TORCH_TYPES[spec.onnx_type].itemsize
        for key, value in (("location", "weights"), ("offset", "0"), ("length", f"{length}")):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value
        proto.graph.input.remove(given)
    return replace(model, proto=bytes(proto.SerializeToString()))


def _nodes_of(graph: GraphModule) -> Graph:
    """A copy of a graph's nodes, whose constants its module holds."""
    new = Graph()
    new.output(new.graph_copy(graph.graph, {}))
    return new


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _serialise(model: Any) -> bytes:
    import onnx
    import onnx_ir as ir

    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    return bytes(proto.SerializeToString())


# --- inputs and outputs ---------------------------------------------------------------------------


def _row_major(
    graph: GraphModule, expected: Sequence[Any], permuted: bool
) -> tuple[GraphModule, list[Input]]:
    """A copy of the graph whose inputs and outputs are row-major, with permutations inside."""
    new = Graph()
    nodes: dict[Node, Node] = {}
    inputs: list[Input] = []
    moved: list[tuple[Node, tuple[int, ...]]] = []
    for node in graph.graph.nodes:
        if node.op == "output":
            break
        nodes[node] = new.node_copy(node, nodes.__getitem__)
        nodes[node].meta = dict(node.meta)
        if node.op == "placeholder":
            inputs.append(_input(node, len(inputs), permuted))
            order = inputs[-1].order
            if order is not None:
                moved.append((nodes[node], order))
    first = next((node for node in new.nodes if node.op != "placeholder"), None)
    for placeholder, order in moved:
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
        order = permutation(value) if permuted and isinstance(value, torch.Tensor) else None
        if result is not None and order is not None and order != tuple(range(len(order))):
            result = new.call_function(aten.permute.default, (result, list(order)))
            result.meta["val"] = value.permute(order)
        results.append(result)
    new.output(tuple(results))
    return GraphModule(graph, new), inputs


def _input(node: Node, position: int, permuted: bool) -> Input:
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        order = permutation(value) if permuted else None
        moved = order is not None and order != tuple(range(value.dim()))
        return Input("", position, onnx_type(value.dtype), order if moved else None)
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return Input("", position, onnx_type(torch.int64), number=True)
    raise fuseboard.LoweringError(f"input {node.name} is a {type(value).__name__}")


def _named(value: Input, name: str) -> Input:
    return Input(name, value.position, value.onnx_type, value.order, value.number)


def _describe_outputs(
    graph: GraphModule, given: Sequence[Any], expected: Sequence[Any], permuted: bool
) -> tuple[list[Output | None], str]:
    """What each output of a call is; the graph is left with those that a model computes."""
    output = graph.graph.output_node()
    placeholders = graph.graph.find_nodes(op="placeholder")
    described: list[Output | None] = []
    first: dict[Node, int] = {}
    shapes: list[Any] = []
    for number, (node, value) in enumerate(zip(output.args[0], expected, strict=True)):
        if node is None:
            described.append(None)
            continue
        if not isinstance(value, torch.Tensor):
            raise fuseboard.LoweringError(f"output {number} is a {type(value).__name__}")
        made = _order_and_strides(value) if permuted else Output()
        if node in first:
            made = replace(made, copy_of=first[node])
        elif node in placeholders:
            made = replace(made, passes=placeholders.index(node))
        else:
            first[node] = number
            shapes.append(node.meta["val"].shape)
            static = tuple(shapes[-1]) if _is_static(shapes[-1]) else None
            made = replace(made, onnx_type=onnx_type(value.dtype), shape=static)
        described.append(made)
    output.args = (tuple(first),)
    for number, found in enumerate(described):
        if found is not None and found.strides is not None and not _is_static(found.strides):
            described[number] = replace(found, strides=None, strides_at=len(shapes))
            shapes.append(found.strides)
    symbolic = not all(map(_is_static, shapes))
    return described, size_function(given, shapes) if symbolic else ""


def _order_and_strides(value: torch.Tensor) -> Output:
    order = permutation(value)
    if order is None:
        return Output(strides=tuple(value.stride()))
    return Output() if order == tuple(range(value.dim())) else Output(order=inverse(order))


def _is_static(numbers: Sequence[Any]) -> bool:
    return all(isinstance(number, int) for number in numbers)


def _named_outputs(outputs: Sequence[Output | None], names: Sequence[str]) -> list[Output | None]:
    given = iter(names)
    return [
        replace(value, name=next(given))
        if value is not None and value.copy_of is None and value.passes is None
        else value
        for value in outputs
    ]
