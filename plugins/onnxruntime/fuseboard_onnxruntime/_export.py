"""A whole captured graph as an ONNX file that others can run, with its weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

import fuseboard
from fuseboard_onnxruntime._convert import convert
from fuseboard_onnxruntime._model import Model
from fuseboard_onnxruntime._options import Options
from fuseboard_onnxruntime._session import Runner, SessionSettings, load_session

#: Weights of more bytes than this lie in a file beside the model: protobuf ends at 2 GB.
MOST_INSIDE = 1_500_000_000


def export(
    graph: GraphModule,
    inputs: Sequence[Any],
    names: Sequence[str],
    weights: Collection[int],
    path: Path,
    options: Options,
) -> tuple[Any, ...]:
    """Write the file, check it, and return what it computes from the inputs.

    :raises LoweringError: an op isn't in the op table, or has no ONNX form.
    """
    import onnx

    _check_ops(graph)
    model = _renamed(convert(graph, permuted=False), names)
    proto = onnx.ModelProto.FromString(model.proto)
    held = [spec for spec in model.inputs if spec.position in weights]
    values = [(spec.name, inputs[spec.position].detach().contiguous()) for spec in held]
    _add_weights(proto, values, path)
    onnx.save_model(proto, path)
    onnx.checker.check_model(str(path))
    runner = Runner(model, [spec for spec in model.inputs if spec.position not in weights])
    return runner(load_session(str(path), SessionSettings.of(options)), inputs)


def _check_ops(graph: GraphModule) -> None:
    from fuseboard_onnxruntime._claim import claim

    for answer in claim(graph, "inference"):
        if isinstance(answer, fuseboard.Decline):
            node = next(node for node in graph.graph.nodes if node.name == answer.node)
            raise fuseboard.LoweringError(f"{node.target} can't be exported: {answer.reason}")


def _renamed(model: Model, names: Sequence[str]) -> Model:
    """The model with names for its inputs and outputs that tell what they are."""
    import onnx

    if not model.proto:
        raise fuseboard.LoweringError("the graph computes nothing")
    proto = onnx.ModelProto.FromString(model.proto)
    renames = {spec.name: names[spec.position] for spec in model.inputs}
    computed = [output for output in model.outputs if output is not None and output.name]
    renames.update({output.name: f"output_{i}" for i, output in enumerate(computed)})
    taken = {name for node in proto.graph.node for name in (*node.input, *node.output)}
    taken -= renames.keys()
    renames = {old: new if new not in taken else f"{new}_value" for old, new in renames.items()}
    for node in proto.graph.node:
        node.input[:] = [renames.get(name, name) for name in node.input]
        node.output[:] = [renames.get(name, name) for name in node.output]
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        value.name = renames.get(value.name, value.name)
    return replace(
        model,
        proto=proto.SerializeToString(),
        inputs=tuple(replace(spec, name=renames[spec.name]) for spec in model.inputs),
        outputs=tuple(
            output and (replace(output, name=renames[output.name]) if output.name else output)
            for output in model.outputs
        ),
    )


def _add_weights(proto: Any, values: Sequence[tuple[str, torch.Tensor]], path: Path) -> None:
    """Turn inputs into initializers, inside the model or in a file beside it."""
    inputs = {value.name: value for value in proto.graph.input}
    total = sum(value.numel() * value.element_size() for _, value in values)
    beside = path.with_name(f"{path.name}.data") if total > MOST_INSIDE else None
    offset = 0
    for name, value in values:
        tensor = proto.graph.initializer.add()
        tensor.name = name
        tensor.data_type = inputs[name].type.tensor_type.elem_type
        tensor.dims.extend(value.shape)
        data = value.numpy().tobytes()
        if beside is None:
            tensor.raw_data = data
        else:
            with beside.open("ab" if offset else "wb") as file:
                file.write(data)
            _point_to(tensor, beside.name, offset, len(data))
            offset += len(data)
        proto.graph.input.remove(inputs[name])


def _point_to(tensor: Any, location: str, offset: int, length: int) -> None:
    import onnx

    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)
