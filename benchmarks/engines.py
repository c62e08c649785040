"""Engines used directly, by their own Python API: what a plugin of the engine is held against.

Float32 as exact as the engine can, torch's number of threads, torch's memory for inputs and
results.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Call = Callable[..., Any]


def onnxruntime(module: Any) -> Call:
    """``torch.onnx.export``, then ``InferenceSession`` with IO binding and every optimisation."""
    return _compiled_by_first_call(module, _onnxruntime_session)


def openvino(module: Any) -> Call:
    """``openvino.convert_model``, then ``compile_model`` in float32."""
    return _compiled_by_first_call(module, _openvino_request)


def _compiled_by_first_call(module: Any, compile_with: Callable[[Any, Any], Call]) -> Call:
    """What compiles for the shapes of its first call's inputs, and costs what that costs."""
    made: list[Call] = []

    def call(*args: Any) -> Any:
        import torch

        if not made:
            with torch.no_grad():
                made.append(compile_with(module, args))
        return made[0](*args)

    return call


def _onnxruntime_session(module: Any, args: Sequence[Any]) -> Call:
    import onnxruntime as ort
    import torch

    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        program = torch.onnx.export(module, tuple(args), dynamo=True, verbose=False)
        program.save(str(path), external_data=True)
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]
    results = [item.name for item in session.get_outputs()]
    like = _results(module, args)

    def call(*args: Any) -> Any:
        binding = session.io_binding()
        inputs = [value.contiguous() for value in args]
        for name, value in zip(names, inputs, strict=True):
            kind = _numpy_type(value)
            binding.bind_input(name, "cpu", 0, kind, tuple(value.shape), value.data_ptr())
        outputs = [torch.empty(value.shape, dtype=value.dtype) for value in like]
        for name, value in zip(results, outputs, strict=True):
            kind = _numpy_type(value)
            binding.bind_output(name, "cpu", 0, kind, tuple(value.shape), value.data_ptr())
        session.run_with_iobinding(binding)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return call


def _results(module: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Eager's, for their shapes and dtypes."""
    answer = module(*args)
    return answer if isinstance(answer, tuple) else (answer,)


def _numpy_type(value: Any) -> Any:
    """A tensor's dtype as ONNX Runtime's bindings take it."""
    import numpy
    import torch

    return {
        torch.float32: numpy.float32,
        torch.int64: numpy.int64,
        torch.int32: numpy.int32,
        torch.bool: numpy.bool_,
    }[value.dtype]


def _openvino_request(module: Any, args: Sequence[Any]) -> Call:
    import openvino
    import torch

    model = openvino.convert_model(module, example_input=tuple(args))
    shapes = {place: list(value.shape) for place, value in enumerate(args)}
    model.reshape(shapes)
    config = {
        "INFERENCE_PRECISION_HINT": "f32",
        "EXECUTION_MODE_HINT": "ACCURACY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "ENABLE_CPU_PINNING": False,
    }
    request = openvino.Core().compile_model(model, "CPU", config).create_infer_request()
    like = _results(module, args)

    def call(*args: Any) -> Any:
        outputs = [torch.empty(value.shape, dtype=value.dtype) for value in like]
        bound = [value.contiguous() for value in args]
        for place, value in enumerate(bound):
            request.set_input_tensor(place, openvino.Tensor(value.numpy(), shared_memory=True))
        for place, value in enumerate(outputs):
            request.set_output_tensor(place, openvino.Tensor(value.numpy(), shared_memory=True))
        request.infer()
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return call
