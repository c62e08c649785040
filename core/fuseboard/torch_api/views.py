"""Strides of fake views, and of fake results of some other ops, made the kernel's.

They are so within :func:`eager_strides` alone, which is wherever the board traces or compiles.
Outside of it every compiler sees torch's own, so that its cached code is what its keys say.

*Views.* A dimension of size 1 may have any stride, and in views torch's fake values have others
than its kernels make. Nothing is read by such a stride, but whether a tensor is taken for channels
last depends on it: behind ``x.transpose(1, 2).view(1, c, h, w)`` the fake convolution is channels
last and eager's isn't, and so is all that follows. What is compiled for fake values would have
other strides than eager's. Read against torch 2.13: ``torch/_subclasses/fake_impls.py``, whose
``view`` goes by ``_reshape_view_helper`` of ``torch/_refs``; the kernel's is ``computeStride_impl``
of ``aten/src/ATen/TensorUtils.cpp``.

*Results in a memory format.* The CPU's kernels of batch norms lay their result out as row-major or
as channels last, whichever their input is nearer to; their decompositions, which torch takes for
fake kernels, keep any order of dimensions. Behind ``norm(x.transpose(1, 2)).transpose(1, 2)`` a
linear layer then views what is no view in eager, and the captured graph raises. The decompositions
of ``roll`` and ``channel_shuffle`` are row-major where the kernels are channels last, and gradients
of some losses keep an order where the kernels' are row-major: behind ``mse_loss(codes[i].permute(0,
3, 1, 2), z)`` of a VQ-VAE the backward views what is no view in eager. Found by
calling both on tensors that lie in several ways, with torch 2.13; fake tensors take decompositions
in ``FakeTensorMode._dispatch_impl`` of ``torch/_subclasses/fake_tensor.py``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)

#: Ops whose first result has the memory format of an argument on CPU → the argument's position;
#: None: it is row-major.
_IN_FORMAT_OF: dict[Any, int | None] = {
    torch.ops.aten.native_batch_norm.default: 0,
    torch.ops.aten._native_batch_norm_legit.default: 0,
    torch.ops.aten._native_batch_norm_legit.no_stats: 0,
    torch.ops.aten._native_batch_norm_legit_no_training.default: 0,
    torch.ops.aten._native_batch_norm_legit_functional.default: 0,
    torch.ops.aten.native_batch_norm_backward.default: 1,
    torch.ops.aten.roll.default: 0,
    torch.ops.aten.channel_shuffle.default: 0,
    torch.ops.aten.mse_loss_backward.default: None,
    torch.ops.aten.smooth_l1_loss_backward.default: None,
    torch.ops.aten.huber_loss_backward.default: None,
}

#: Whether fake results have eager's strides here; None where nobody has said so.
_are_eagers: ContextVar[bool | None] = ContextVar("fake values have eager's strides", default=None)
#: What keys of torch's cache of fake results have besides, where they do.
_IN_KEYS = "fuseboard: eager's strides"
#: Attributes in which wrappers around a backend hold it: ``torch._TorchCompileWrapper``, and
#: ``WrapBackendDebug`` of ``torch/_dynamo/repro/after_dynamo.py``.
_WRAPPED = ("compiler_fn", "_torchdynamo_orig_backend")


@contextlib.contextmanager
def eager_strides() -> Iterator[None]:
    """Let fake results have the strides of real ones, for the block, in this thread.

    A compiler that is given a graph looks through its fake values again, and must find the same
    strides as the one that captured it: all that the board does with fake values is to be in such a
    block.
    """
    why_not_installed()
    token = _are_eagers.set(True)
    try:
        yield
    finally:
        _are_eagers.reset(token)


@functools.cache
def why_not_installed() -> str:
    """Install what :func:`eager_strides` switches on; why it can't be, "" if it can.

    torch's own function goes on being called. Outside of blocks its result is returned as it is.
    Dynamo traces before it calls its backend, so the board's has this installed with its import.
    """
    from torch import _decomp
    from torch._subclasses import fake_impls, fake_tensor

    known = getattr(fake_impls, "op_implementations_dict", {})
    keys: Any = getattr(fake_tensor, "_DispatchCacheKey", None)
    metas: Any = getattr(_decomp, "meta_table", None)
    parts = _decomp.decomposition_table
    if (
        keys is None
        or metas is None
        or any(known.get(op) is None for op in _VIEWS)
        or any(op in known or op in metas or op not in parts for op in _IN_FORMAT_OF)
    ):
        return (
            "this torch computes fake views or batch norms elsewhere: they may have other strides "
            "than eager's, for which compilers then trip"
        )
    for op in _VIEWS:
        known[op] = _with_eager_strides(known[op])
    for op, position in _IN_FORMAT_OF.items():
        made = _in_format_of(position, parts[op])
        # Fake tensors take an op's decomposition before what is known of it, unless it has a meta
        # function. After torch's import nothing else looks at this table.
        known[op] = metas[op] = made
    keys.__init__ = _keyed(keys.__init__)
    return ""


def _keyed(make_key: Callable[..., None]) -> Callable[..., None]:
    """torch keeps the results of fake ops for all who trace; those of many ops are views' results.

    :param make_key: the constructor of a key (``FakeTensorMode._cache_key``).
    """

    @wraps(make_key)
    def make(self: Any, values: tuple[object, ...]) -> None:
        make_key(self, (*values, _IN_KEYS) if _are_wanted() else values)

    return make


def _are_wanted() -> bool:
    said = _are_eagers.get()
    return _dynamo_traces_for_the_board() if said is None else said


def _dynamo_traces_for_the_board() -> bool:
    """Dynamo computes with fake values, too: a program may ask for strides, and a view may fail.

    Read in ``torch/_dynamo/symbolic_convert.py`` (``tls.current_tx``) and ``output_graph.py``.
    """
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    tracing = getattr(getattr(dynamo, "tls", None), "current_tx", None)
    backend = getattr(getattr(tracing, "output", None), "compiler_fn", None)
    while backend is not None:
        if str(getattr(backend, "__module__", "")).startswith("fuseboard."):
            return True
        inner = (getattr(backend, name, None) for name in _WRAPPED)
        backend = next((one for one in inner if one is not None), None)
    return False


def _with_eager_strides(fake: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(fake)
    def view(mode: Any, op: Any, source: Any, *shape: Any, **keywords: Any) -> Any:
        result = fake(mode, op, source, *shape, **keywords)
        if not _are_wanted():
            return result
        if source.dim() == 0 or any(_is(size, 0) for size in source.shape):
            return result
        strides = _real_strides(result, source.stride(-1))
        return result if strides is None else result.as_strided(result.shape, strides)

    return view


def _in_format_of(position: int | None, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """A fake kernel: the decomposition, as torch has it, with the kernel's strides where wanted."""

    def compute(mode: Any, op: Any, *args: Any, **keywords: Any) -> Any:
        with mode:
            results = decomposition(*args, **keywords)
            if not _are_wanted():
                return results
            first = results[0] if isinstance(results, tuple) else results
            if first is None:
                return results
            if position is not None:
                strides = _strides_in_format(args[position])
            else:
                strides = _ordered(first.shape, range(first.dim())) if _is_on_cpu(first) else None
            if strides is None or list(map(str, strides)) == list(map(str, first.stride())):
                return results
            laid_out = first.new_empty_strided(first.shape, strides)
        if not isinstance(results, tuple):
            return laid_out
        return (laid_out, *results[1:])

    return compute


def _strides_in_format(like: torch.Tensor) -> list[Any] | None:
    """Row-major or channels last, as the kernels of the CPU choose; None where that isn't known.

    Symbolic strides are compared as they are written, so that no guard is added.
    """
    if not _is_on_cpu(like):
        return None
    plain = all(isinstance(number, int) for number in (*like.shape, *like.stride()))
    row_major = _ordered(like.shape, range(like.dim()))
    if like.dim() not in (4, 5):
        return row_major
    channels_last = _ordered(like.shape, (0, *range(2, like.dim()), 1))
    if _same_order(like, row_major):
        return row_major
    if _same_order(like, channels_last):
        return channels_last
    if not plain:
        return None
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = torch._prims_common.suggest_memory_format(like)
    return channels_last if wanted == formats[like.dim()] else row_major


def _is_on_cpu(value: torch.Tensor) -> bool:
    return value.device.type == "cpu"


def _same_order(value: torch.Tensor, strides: Sequence[Any]) -> bool:
    """Whether a tensor has these strides, but for dimensions of size 1."""
    sizes = zip(value.shape, value.stride(), strides, strict=True)
    return all(_is(size, 1) or str(own) == str(other) for size, own, other in sizes)


def _ordered(shape: torch.Size, order: Iterable[int]) -> list[Any]:
    """Strides without gaps for dimensions that lie in this order in memory, outermost first."""
    strides: list[Any] = [1] * len(shape)
    step: Any = 1
    for dim in reversed(tuple(order)):
        strides[dim] = step
        step = step * (shape[dim] if not _is(shape[dim], 0) else 1)
    return strides


def _real_strides(view: torch.Tensor, last: Any) -> list[Any] | None:
    """A view's strides as the kernel makes them; None where it has them.

    Dimensions of size 1 go on where the next one ends. No guard is added: sizes of 1 are plain
    numbers, for which Dynamo has no symbols.

    :param last: the stride of the last dimension of what is viewed.
    """
    strides = list(view.stride())
    differs = False
    step = last
    for dim in reversed(range(len(strides))):
        if _is(view.shape[dim], 1) and str(strides[dim]) != str(step):
            strides[dim], differs = step, True
        step = view.shape[dim] * strides[dim]
    return strides if differs else None


def _is(size: Any, number: int) -> bool:
    """Whether a size is known to be this number."""
    return isinstance(size, int) and size == number
