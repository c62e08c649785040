"""Sessions of ONNX Runtime: made from a model, called with raw pointers of torch's tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fuseboard_onnxruntime._dtypes import TORCH_TYPES
from fuseboard_onnxruntime._model import Input, Model, Output
from fuseboard_onnxruntime._sizes import compile_sizes

#: Tensors without elements have no address, and ONNX Runtime wants one.
_NOWHERE = ctypes.create_string_buffer(64)
_SOMEWHERE = ctypes.addressof(_NOWHERE)

#: The fusion of gelu(x, approximate="tanh") removes the node of x * 0.5 whoever else reads it (ONNX
#: Runtime's core/optimizer/fast_gelu_fusion.cc asks every other node for a single reader, not this
#: one). Its elimination of common subexpressions shares such nodes before: with a backward that
#: computes the gelu again, or with the user's own product.
_FAST_GELU = "FastGeluFusion"
#: What ONNX Runtime says of the model once the node is gone.
_INCOMPLETE = "is not a graph input, initializer, or output of a previous node"

#: Option → name in ``onnxruntime.GraphOptimizationLevel``.
LEVELS = {
    "none": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}

_NUMPY_NAMES = {
    torch.float32: "float32",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}


@dataclass(frozen=True)
class SessionSettings:
    """The plugin's options, apart from what checks them: a process that loads has no use for it.

    :ivar optimization: by ONNX Runtime's name.
    """

    optimization: str = LEVELS["all"]
    threads: int = 0
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    allow_spinning: bool = True

    @classmethod
    def of(cls, options: Any) -> SessionSettings:
        """Those of options; None: the defaults."""
        if options is None:
            return cls()
        level = LEVELS[options.optimization]
        return cls(level, options.threads, options.providers, options.allow_spinning)


def make_session(
    model: Model,
    settings: SessionSettings,
    weights: Sequence[torch.Tensor] = (),
    names: Sequence[str] = (),
) -> Any:
    """A session.

    :param weights: for the initializers of the model, which ONNX Runtime folds and packs; they are
        copied.
    :param names: of these.
    """
    if not model.proto:
        return None
    options = _options(settings)
    if weights:
        values = [_ort_value(weight) for weight in weights]
        options.add_external_initializers(list(names), values)
    return _session(model.proto, options, settings.providers)


def load_session(path: str, settings: SessionSettings) -> Any:
    """A session of a model in a file."""
    return _session(path, _options(settings), settings.providers)


def _session(model: Any, options: Any, providers: Sequence[str]) -> Any:
    import onnxruntime

    make = partial(onnxruntime.InferenceSession, model, options, list(providers))
    try:
        return make()
    except Exception as error:
        if _INCOMPLETE not in str(error):
            raise
    return make(disabled_optimizers=[_FAST_GELU])


def _options(given: SessionSettings) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(
        onnxruntime.GraphOptimizationLevel, given.optimization
    )
    options.intra_op_num_threads = given.threads or torch.get_num_threads()
    options.inter_op_num_threads = 1
    # Errors are raised as well, and an index of the user's that is out of range is eager's error.
    options.log_severity_level = 4
    spinning = "1" if given.allow_spinning else "0"
    options.add_session_config_entry("session.intra_op.allow_spinning", spinning)
    # Without VNNI, sums of two products of 8 bits would be cut off at 16; this way they aren't.
    options.add_session_config_entry("session.x64quantprecision", "1")
    # Its own kernels between dequantise and quantise round a convolution's bias to integers.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    # What spins after a call takes time from what torch runs next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def _ort_value(weight: torch.Tensor) -> Any:
    """A value of ONNX Runtime's on a weight's memory, which outlives the making of the session."""
    from onnxruntime import OrtValue

    return OrtValue.ortvalue_from_numpy(weight.detach().contiguous().numpy())


class Runner:
    """Calls sessions of one model; safe to be called from several threads."""

    def __init__(self, model: Model, given: Sequence[Input]) -> None:
        import numpy

        self._made_from = model, tuple(given)
        types = {number: numpy.dtype(_NUMPY_NAMES[t]) for number, t in TORCH_TYPES.items()}
        self._inputs = [(value, types[value.onnx_type].type) for value in given]
        self._outputs = model.outputs
        self._types = {number: kind.type for number, kind in types.items()}
        self._sizes: Callable[..., Any] | None = compile_sizes(model.sizes) if model.sizes else None

    def __reduce__(self) -> tuple[Any, ...]:
        return Runner, self._made_from

    def __call__(self, session: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        if session is None:
            sizes = self._sizes(args) if self._sizes is not None else ()
            return tuple(out and _finished(out, (), 0, args, sizes) for out in self._outputs)
        binding = session.io_binding()
        bind = binding.bind_input
        held = []
        for spec, kind in self._inputs:
            value = args[spec.position]
            if spec.number:
                value = torch.tensor(value, device="cpu")
            elif spec.order is not None:
                value = value.permute(spec.order).contiguous()
            else:
                value = value.contiguous()
            held.append(value)  # until the call is over
            bind(spec.name, "cpu", 0, kind, value.shape, value.data_ptr() or _SOMEWHERE)
        sizes = self._sizes(args) if self._sizes is not None else ()
        shapes = iter(sizes)
        made: list[Any] = []
        for output in self._outputs:
            if output is None or not output.name:
                made.append(None)
                continue
            shape = next(shapes) if sizes else output.shape
            result = torch.empty(shape, dtype=TORCH_TYPES[output.onnx_type], device="cpu")
            made.append(result)
            address = result.data_ptr() or _SOMEWHERE
            kind = self._types[output.onnx_type]
            binding.bind_output(output.name, "cpu", 0, kind, shape, address)
        session.run_with_iobinding(binding)
        return tuple(
            None if output is None else _finished(output, made, number, args, sizes)
            for number, output in enumerate(self._outputs)
        )


def _finished(
    output: Output, made: Sequence[Any], number: int, args: Sequence[Any], sizes: Sequence[Any]
) -> Any:
    """A result in torch's dimensions and strides."""
    if output.passes is not None:
        value = args[output.passes].clone(memory_format=torch.contiguous_format)
    elif output.copy_of is not None:
        value = made[output.copy_of].clone()
    else:
        value = made[number]
    if output.order is not None:
        value = value.permute(output.order)
    if output.strides_at is not None:
        return _strided(value, sizes[output.strides_at])
    return value if output.strides is None else _strided(value, output.strides)


def _strided(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy with other strides; what is expanded (stride 0) is there once."""
    once = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    memory = torch.empty_strided(once.shape, strides, dtype=value.dtype, device="cpu").copy_(once)
    return memory.as_strided(value.shape, strides)
