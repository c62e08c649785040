"""From an ATen graph to OpenVINO's model, and from a model and its weights to a session."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any

import openvino
import torch
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder
from torch.fx import GraphModule

import fuseboard

TYPES = {
    torch.bool: openvino.Type.boolean,
    torch.float32: openvino.Type.f32,
    torch.int32: openvino.Type.i32,
    torch.int64: openvino.Type.i64,
}


aten = torch.ops.aten

#: Ops of which OpenVINO makes something else of a NaN: 0 of ``relu``'s, infinity of ``exp``'s.
LOSES_NAN = {
    aten._log_softmax.default: "log_softmax",
    aten._scaled_dot_product_flash_attention_for_cpu.default: "attention",
    aten._softmax.default: "softmax",
    aten.exp.default: "exp",
    aten.max_pool2d_with_indices.default: "max_pool2d",
    aten.relu.default: "relu",
}


class Model:
    """A converted graph: every input a parameter, whether weight or not.

    :param graph: its placeholders carry fake values, and all of them are read.
    :raises fuseboard.LoweringError: the converter can't, or would answer with other dtypes.
    """

    def __init__(self, graph: GraphModule) -> None:
        inputs = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
        results = graph.graph.output_node().args[0]
        self.notes = _notes(graph)
        self.outputs = [node.meta["val"] for node in results]  # type: ignore[union-attr]
        frontend = FrontEndManager().load_by_framework("pytorch")
        self._decoder = TorchFXPythonDecoder(graph)  # the model reads from it as long as it lives
        try:
            with fuseboard.real_tensors():  # of which there are constants
                self._model = frontend.convert(frontend.load(self._decoder))
        except Exception as error:  # the bindings raise several kinds, by release
            raise fuseboard.LoweringError(f"OpenVINO's converter: {error}") from error
        for parameter, value in zip(self._model.get_parameters(), inputs, strict=True):
            parameter.set_element_type(TYPES[value.dtype])
            parameter.set_partial_shape(openvino.PartialShape(list(value.shape)))
        self._model.validate_nodes_and_infer_types()
        self._check()

    def _check(self) -> None:
        for result, value in zip(self._model.outputs, self.outputs, strict=True):
            shape = result.get_partial_shape()
            fits = shape.is_static and list(shape.to_shape()) == list(value.shape)
            if result.get_element_type() != TYPES.get(value.dtype) or not fits:
                raise fuseboard.LoweringError(
                    f"OpenVINO would answer {result.get_element_type()} {shape} where "
                    f"{value.dtype} {list(value.shape)} is meant"
                )

    def session(self, weights: Mapping[int, torch.Tensor], config: dict[str, Any]) -> Session:
        """Compile the model with some of its inputs fixed to weights.

        :param weights: by position among the inputs. Their memory is read, not copied.
        """
        model = self._model.clone()
        kept = {place: weight.detach().contiguous() for place, weight in weights.items()}
        for place, parameter in enumerate(list(model.get_parameters())):
            if place in kept:
                constant = openvino.opset16.constant(kept[place].numpy(), shared_memory=True)
                parameter.output(0).replace(constant.output(0))
                model.remove_parameter(parameter)
        compiled = openvino.Core().compile_model(model, "CPU", config)
        return Session(compiled, self.outputs, list(kept.values()))


def _notes(graph: GraphModule) -> tuple[str, ...]:
    """What people should know of the answers."""
    ops = {node.target for node in graph.graph.nodes} & set(LOSES_NAN)
    if not ops:
        return ()
    names = ", ".join(sorted(LOSES_NAN[op] for op in ops))
    return (f"a NaN doesn't come through OpenVINO's {names} as through eager's",)


class Session:
    """A compiled model; calls from several threads each have a request of their own.

    :param weights: kept alive, since the compiled model may read them.
    """

    def __init__(
        self, compiled: Any, outputs: Sequence[torch.Tensor], weights: list[torch.Tensor]
    ) -> None:
        self._compiled = compiled
        self._weights = weights
        self._outputs = [(tuple(value.shape), value.dtype) for value in outputs]
        self._strides = {i: o.stride() for i, o in enumerate(outputs) if not o.is_contiguous()}
        self._copied = _inputs_as_results(compiled)
        self._idle: queue.SimpleQueue[_Request] = queue.SimpleQueue()

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        try:
            request = self._idle.get_nowait()
        except queue.Empty:
            request = _Request(self._compiled.create_infer_request(), self._copied)
        results = [torch.empty(shape, dtype=dtype) for shape, dtype in self._outputs]
        request.run([value.detach().contiguous() for value in inputs], results)
        self._idle.put(request)
        for place, stride in self._strides.items():
            results[place] = _laid_out(results[place], stride)
        return tuple(results)


def _laid_out(value: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy with these strides; a stride of 0 repeats what is there once."""
    once = [1 if step == 0 else size for size, step in zip(value.shape, stride, strict=True)]
    copy = torch.empty_strided(once, stride, dtype=value.dtype)
    copy.copy_(value[tuple(slice(size) for size in once)])
    return copy.as_strided(value.shape, stride)


def _inputs_as_results(compiled: Any) -> frozenset[int]:
    """The results that are an input, perhaps in another shape.

    OpenVINO lets the two share memory: bound to a tensor of ours, such a result would have the
    *input* written to.
    """
    found = set()
    for place, result in enumerate(compiled.get_runtime_model().get_results()):
        source = result.input_value(0).get_node()
        while _layer(source) == "Reshape":
            source = source.input_value(0).get_node()
        if _layer(source) == "Input":
            found.add(place)
    return frozenset(found)


def _layer(node: Any) -> str:
    return str(node.get_rt_info()["layerType"].value)


class _Request:
    """An infer request, and the tensors that it was last given.

    It goes on pointing at their memory until the next call replaces them, so they are kept.
    """

    def __init__(self, request: Any, copied: frozenset[int]) -> None:
        self._request = request
        self._copied = copied
        self._bound: list[Any] = []

    def run(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        bound: list[Any] = []
        for place, value in enumerate(inputs):
            bound.append(openvino.Tensor(value.numpy(), shared_memory=True))
            self._request.set_input_tensor(place, bound[-1])
        for place, value in enumerate(results):
            if place not in self._copied:
                bound.append(openvino.Tensor(value.numpy(), shared_memory=True))
                self._request.set_output_tensor(place, bound[-1])
        self._bound = bound
        self._request.infer()
        for place in self._copied:
            results[place].numpy()[...] = self._request.get_output_tensor(place).data
