"""Single ops in float64, whatever dtype they were captured in.

What is meant is the function that the graph stands for, without roundings: inputs, constants and
dtype arguments are *lifted*, floating ones to float64 and complex ones to complex128. So a cast to
float16 in the middle of a graph is no cast here. Casts to integers, booleans and 8-bit floats stay,
since they are meant to lose something.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

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


@functools.cache
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


def lift_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in float64 with all of the memory that it is a view of, where it lies in it."""
    dtype = _LIFTED.get(tensor.dtype)
    if dtype is None or tensor.layout != torch.strided:
        return tensor
    plain = tensor.resolve_conj().resolve_neg()
    elements = plain.untyped_storage().nbytes() // plain.dtype.itemsize
    memory = plain.as_strided((elements,), (1,), 0).to(dtype)
    return memory.as_strided(plain.shape, plain.stride(), plain.storage_offset())


def lift_all(value: Any) -> Any:
    """Lift the tensors in lists and tuples."""
    if isinstance(value, torch.Tensor):
        return lift(value)
    if isinstance(value, list | tuple):
        return type(value)(map(lift_all, value)) if type(value) in (list, tuple) else value
    return value


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    result = tensor.to(dtype)
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return result
    if result.stride() == tensor.stride():
        return result
    return restrided(result.resolve_conj().resolve_neg(), tensor.stride())


def restrided(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The same elements laid out with given strides, which may overlap and leave gaps.

    :param tensor: elements that are to share memory are equal.
    """
    spans = zip(tensor.shape, strides, strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in spans)
    memory = torch.zeros(elements, dtype=tensor.dtype, device=tensor.device)
    view = memory.as_strided(tensor.shape, tuple(strides))
    if not _overlaps(view):
        view.copy_(tensor)
        return view
    places = torch.zeros(tensor.shape, dtype=torch.int64, device=tensor.device)
    for dim, stride in enumerate(strides):
        shape = [1] * tensor.dim()
        shape[dim] = tensor.shape[dim]
        steps = torch.arange(tensor.shape[dim], device=tensor.device)
        places += (steps * stride).view(shape)
    memory[places] = tensor
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
    special = _special(target)
    if special is not None:
        return special(target, new_args, new_kwargs, own)
    if isinstance(own, torch.dtype) and own in _LIFTED:
        if new_kwargs.get("dtype") is None and _takes_dtype(target):
            new_kwargs["dtype"] = _LIFTED[own]  # else the default dtype, for full and arange
        elif pointwise(target) and target._schema.name != "aten::where":
            new_args = _integers_lifted(new_args)
    return new_args, new_kwargs


def _lifted_argument(value: Any) -> Any:
    return _LIFTED.get(value, value) if isinstance(value, torch.dtype) else value


@functools.cache
def _takes_dtype(target: Any) -> bool:
    return any(
        argument.name == "dtype" and argument.kwarg_only for argument in target._schema.arguments
    )


@functools.cache
def pointwise(target: Any) -> bool:
    """Whether each element of an op's result depends on one element of each argument."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


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


@functools.cache
def _special(target: Any) -> Callable[[Any, Any, Any, Any], _Arguments] | None:
    return _SPECIAL.get(target._schema.name)


_SPECIAL: dict[str, Callable[[Any, Any, Any, Any], _Arguments]] = {
    "aten::_softmax": _softmax,
    "aten::_log_softmax": _softmax,
    "aten::nan_to_num": _nan_to_num,
    "aten::rms_norm": _rms_norm,
    "aten::_fused_rms_norm": _rms_norm,
}


def cast_down(value: Any, form: Any, wide: bool) -> Any:
    """A lifted value in the dtypes that eager has.

    :param form: eager's form, which has a ``dtype``, or a list of them.
    :param wide: float32 in place of half types.
    """
    if isinstance(value, torch.Tensor):
        if form is None or not _same_kind(value.dtype, form.dtype):
            return value
        dtype = _widened(form.dtype) if wide else form.dtype
        return value if value.dtype == dtype else _cast(value, dtype)
    if isinstance(value, list | tuple) and isinstance(form, list):
        pairs = zip(value, form, strict=True)
        return type(value)(cast_down(item, own, wide) for item, own in pairs)
    return value


def halves_widened(value: Any) -> Any:
    """A tensor of a half type in float32; anything else as it is."""
    if isinstance(value, torch.Tensor) and _widened(value.dtype) != value.dtype:
        return _cast(value, _widened(value.dtype))
    return value


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _same_kind(one: torch.dtype, other: torch.dtype) -> bool:
    return one.is_floating_point == other.is_floating_point and one.is_complex == other.is_complex


#: Ops whose result holds whatever was in memory.
_MEMORY = frozenset(
    {
        *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted"),
        *("aten::new_empty", "aten::new_empty_strided"),
        *("prims::empty_strided", "prims::empty_permuted"),
    }
)

#: Ops that round nothing: they move elements, choose among them or drop digits. Views are known by
#: their schema.
_EXACT = frozenset(
    {
        *("aten::abs", "aten::amax", "aten::amin", "aten::ceil", "aten::clamp", "aten::clamp_max"),
        *("aten::clamp_min", "aten::floor", "aten::frac", "aten::hardtanh", "aten::max"),
        *("aten::maximum", "aten::min", "aten::minimum", "aten::neg", "aten::relu", "aten::round"),
        *("aten::sign", "aten::sort", "aten::threshold", "aten::threshold_backward"),
        *("aten::topk", "aten::trunc", "aten::max_pool2d_with_indices", "aten::_to_copy"),
        *("aten::full", "aten::full_like", "aten::scalar_tensor", "aten::arange"),
        *("aten::zeros", "aten::ones", "aten::zeros_like", "aten::ones_like", "aten::cummax"),
        *("aten::cummin", "aten::kthvalue", "aten::median", "aten::mode", "aten::fmax"),
        *("aten::fmin", "aten::nan_to_num", "prims::convert_element_type"),
        *("aten::cat", "aten::clone", "aten::constant_pad_nd", "aten::copy", "aten::embedding"),
        *("aten::flip", "aten::gather", "aten::index", "aten::index_select"),
        *("aten::masked_fill", "aten::masked_scatter", "aten::repeat", "aten::roll"),
        *("aten::scatter", "aten::select_scatter", "aten::slice_scatter", "aten::stack"),
        *("aten::where", "aten::as_strided_scatter", "aten::diagonal_scatter"),
        *("aten::_unsafe_view", "aten::_reshape_copy", "aten::fill", "aten::lift_fresh_copy"),
    }
)


@functools.cache
def leaves_memory(target: Any) -> bool:
    """Whether an op's result holds whatever was in memory."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.name in _MEMORY


@functools.cache
def exact(target: Any) -> bool:
    """Whether an op rounds nothing, or isn't an op of tensors."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return True
    views = any(argument.alias_info is not None for argument in target._schema.arguments)
    adds = "reduce" in target._overloadname
    return views or (target._schema.name in _EXACT and not adds)
