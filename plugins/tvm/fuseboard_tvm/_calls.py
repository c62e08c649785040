"""Torch's operators as functions that a compiled module calls.

A call is described by a JSON text, which is part of the compiled code: it holds in any process.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch
import tvm_ffi

CALL = "fuseboard_tvm.call"
CALL_INTO = "fuseboard_tvm.call_into"
ALIGNMENT = 64

Operand = Callable[[list[torch.Tensor]], Any]


@functools.cache
def _parsed(text: str) -> tuple[Any, Operand, Callable[[list[torch.Tensor]], dict[str, Any]]]:
    spec = json.loads(text)
    namespace, packet, kind = spec["op"].split(".")
    op = getattr(getattr(getattr(torch.ops, namespace), packet), kind or "default")
    args = _decoded(spec["args"])
    kwargs = {name: _decoded(value) for name, value in spec["kwargs"].items()}

    def named(tensors: list[torch.Tensor]) -> dict[str, Any]:
        return {name: value(tensors) for name, value in kwargs.items()}

    return op, args, named


def _decoded(argument: Any) -> Operand:
    """The function that makes an argument from the tensors of a call."""
    if isinstance(argument, dict):
        if "dtype" in argument:
            dtype = getattr(torch, argument["dtype"])
            return lambda tensors: dtype
        which = argument["tensor"]
        if "size" not in argument:
            return lambda tensors: tensors[which]
        place = argument["size"], argument["stride"], argument["offset"]
        return lambda tensors: tensors[which].as_strided(*place)
    if isinstance(argument, list):
        parts = [_decoded(one) for one in argument]
        return lambda tensors: [part(tensors) for part in parts]
    return lambda tensors: argument


@functools.cache
def register() -> None:
    """Make both functions known to TVM, once per process."""
    tvm_ffi.register_global_func(CALL, run, override=True)
    tvm_ffi.register_global_func(CALL_INTO, run_into, override=True)


def text_of(spec: dict[str, Any]) -> str:
    """The description of a call."""
    return json.dumps({name: spec[name] for name in ("op", "args", "kwargs")})


def run(text: str, *given: Any) -> Any:
    """Results as new tensors, those that aren't computed left out."""
    op, args, kwargs = _parsed(text)
    tensors = [torch.from_dlpack(one) for one in given]
    with torch.no_grad():
        found = op(*args(tensors), **kwargs(tensors))
    many = found if isinstance(found, list | tuple) else (found,)
    results = [_owned(one) for one in many if isinstance(one, torch.Tensor)]
    return results if isinstance(found, list | tuple) else results[0]


def run_into(text: str, *given: Any) -> None:
    """The result into the last tensor."""
    op, args, kwargs = _parsed(text)
    tensors = [torch.from_dlpack(one) for one in given]
    out = tensors.pop()
    with torch.no_grad():
        op(*args(tensors), **kwargs(tensors), out=out)


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """Row-major and aligned, as TVM's code takes it for granted."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
