"""Single ops in float64, whatever dtype they were captured in.

What is meant is the function that the graph stands for, without roundings: inputs, constants and
dtype arguments are *lifted*, floating ones to float64 and complex ones to complex128. So a cast to
float16 in the middle of a graph is no cast here. Casts to integers, booleans and 8-bit floats stay,
since they are meant to lose something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

_LIFTED = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}

#: Ops that are about the bits of a dtype: they run in the dtypes that they were captured in.
_ABOUT_BITS = frozenset(
    {
        "aten::view.dtype",
        "aten::view_copy.dtype",
        "prims::view_element_type",
        "aten::nextafter",
    }
)


def lifted_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that stands for another one in the float64 run."""
    return _LIFTED.get(dtype, dtype)


def about_bits(target: Any) -> bool:
    """Whether an op's meaning hangs on the bits of its arguments' dtypes."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.name() in _ABOUT_BITS or target._schema.name in _ABOUT_BITS


def lift(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in float64, with its strides and storage offset."""
    dtype = _LIFTED.get(tensor.dtype)
    if dtype is None:
        return tensor
    return _cast(tensor, dtype)


def lift_all(value: Any) -> Any:
    """Lift the tensors in lists and tuples."""
    if isinstance(value, torch.Tensor):
        return lift(value)
    if isinstance(value, list | tuple):
        return type(value)(map(lift_all, value)) if type(value) in (list, tuple) else value
    return value


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return tensor.to(dtype)
    result = tensor.to(dtype)
    if result.stride() == tensor.stride():
        return result
    return restrided(tensor.resolve_conj().resolve_neg(), tensor.stride(), dtype)


def restrided(
    tensor: torch.Tensor, strides: Sequence[int], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The same elements laid out with given strides; they may overlap and leave gaps."""
    spans = zip(tensor.shape, strides, strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in spans)
    memory = torch.zeros(elements, dtype=dtype or tensor.dtype, device=tensor.device)
    # Of elements that share memory one is written; writing them all is refused by torch.
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    view = memory.as_strided(tensor.shape, tuple(strides))
    target, source = view[once], tensor[once]
    if _overlaps(target):
        for number in range(target.shape[0]):  # a sliding window: row by row
            target[number].copy_(source[number])
    else:
        target.copy_(source)
    return view


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory, as in a sliding window."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def lifted_arguments(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], own: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An op's arguments for the float64 run; tensors among them are lifted already.

    :param own: the dtype of eager's result, or a list of them.
    """
    new_args = tuple(_lifted_argument(value) for value in args)
    new_kwargs = {name: _lifted_argument(value) for name, value in kwargs.items()}
    if not isinstance(target, torch._ops.OpOverload):
        return new_args, new_kwargs
    special = _SPECIAL.get(target._schema.name)
    if special is not None:
        return special(target, new_args, new_kwargs, own)
    if isinstance(own, torch.dtype) and own in _LIFTED:
        if new_kwargs.get("dtype") is None and _takes_dtype(target):
            new_kwargs["dtype"] = _LIFTED[own]  # else the default dtype, for full and arange
        elif torch.Tag.pointwise in target.tags and target._schema.name != "aten::where":
            new_args = _integers_lifted(new_args)
    return new_args, new_kwargs


def _lifted_argument(value: Any) -> Any:
    return _LIFTED.get(value, value) if isinstance(value, torch.dtype) else value


def _takes_dtype(target: Any) -> bool:
    return any(
        argument.name == "dtype" and argument.kwarg_only for argument in target._schema.arguments
    )


def _integers_lifted(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Integer tensors as float64, where an op makes floats of nothing but integers.

    It would compute in the default dtype, float32, as in ``integers / 3``.
    """
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        return args
    return tuple(
        value.to(torch.float64) if isinstance(value, torch.Tensor) else value for value in args
    )


def _named(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments that were given, by name."""
    names = [argument.name for argument in target._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _softmax(target: Any, args: Any, kwargs: Any, own: Any) -> _Arguments:
    """``half_to_float`` is for float16 only; here all is float64 anyway."""
    named = _named(target, args, kwargs)
    return (named["self"], named["dim"], False), {}


def _nan_to_num(target: Any, args: Any, kwargs: Any, own: Any) -> _Arguments:
    """What infinities become is the largest number of the dtype as captured."""
    named = _named(target, args, kwargs)
    if isinstance(own, torch.dtype) and own.is_floating_point:
        limits = torch.finfo(own)
        for name, value in (("posinf", limits.max), ("neginf", limits.min)):
            if named.get(name) is None:
                named[name] = value
    return (named.pop("self"),), named


def _rms_norm(target: Any, args: Any, kwargs: Any, own: Any) -> _Arguments:
    """Without an ``eps`` it is the machine epsilon of the dtype that is computed in."""
    named = _named(target, args, kwargs)
    first = own[0] if isinstance(own, list) else own
    if named.get("eps") is None and isinstance(first, torch.dtype):
        computed = torch.float64 if first == torch.float64 else torch.float32
        named["eps"] = torch.finfo(computed).eps
    return (), {("input" if name == "self" else name): value for name, value in named.items()}


_SPECIAL: dict[str, Callable[[Any, Any, Any, Any], _Arguments]] = {
    "aten::_softmax": _softmax,
    "aten::_log_softmax": _softmax,
    "aten::nan_to_num": _nan_to_num,
    "aten::rms_norm": _rms_norm,
    "aten::_fused_rms_norm": _rms_norm,
}


def lowered_argument(value: Any, node: Node, form: Any) -> Any:
    """A lifted value back in the dtypes that eager has at that node."""
    if isinstance(value, torch.Tensor):
        if form is not None and value.dtype != form.dtype and _same_kind(value.dtype, form.dtype):
            return _cast(value, form.dtype)
        return value
    if isinstance(value, list | tuple) and isinstance(form, list):
        return type(value)(
            lowered_argument(item, node, own) for item, own in zip(value, form, strict=True)
        )
    return value


def _same_kind(one: torch.dtype, other: torch.dtype) -> bool:
    return one.is_floating_point == other.is_floating_point and one.is_complex == other.is_complex
