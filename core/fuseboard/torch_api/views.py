"""Strides of fake views, made the kernel's.

They are so within :func:`eager_view_strides` alone, which is wherever the board traces or compiles.
Outside of it every compiler sees torch's own, so that its cached code is what its keys say.

A dimension of size 1 may have any stride, and in views torch's fake values have others than its
kernels make. Nothing is read by such a stride, but whether a tensor is taken for channels last
depends on it: behind ``x.transpose(1, 2).view(1, c, h, w)`` the fake convolution is channels last
and eager's isn't, and so is all that follows. What is compiled for fake values would have other
strides than eager's. Read against torch 2.13: ``torch/_subclasses/fake_impls.py``, whose ``view``
goes by ``_reshape_view_helper`` of ``torch/_refs``; the kernel's is ``computeStride_impl`` of
``aten/src/ATen/TensorUtils.cpp``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)

#: Whether fake views have eager's strides here; None where nobody has said so.
_are_eagers: ContextVar[bool | None] = ContextVar("fake views have eager's strides", default=None)
#: What keys of torch's cache of fake results have besides, where they do.
_IN_KEYS = "fuseboard: views with eager's strides"
#: Attributes in which wrappers around a backend hold it: ``torch._TorchCompileWrapper``, and
#: ``WrapBackendDebug`` of ``torch/_dynamo/repro/after_dynamo.py``.
_WRAPPED = ("compiler_fn", "_torchdynamo_orig_backend")


@contextlib.contextmanager
def eager_view_strides() -> Iterator[None]:
    """Let fake views have the strides of real ones, for the block, in this thread.

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
    """Install what :func:`eager_view_strides` switches on; why it can't be, "" if it can.

    torch's own function goes on being called. Outside of blocks its result is returned as it is.
    Dynamo traces before it calls its backend, so the board's has this installed with its import.
    """
    from torch._subclasses import fake_impls, fake_tensor

    known = getattr(fake_impls, "op_implementations_dict", {})
    keys: Any = getattr(fake_tensor, "_DispatchCacheKey", None)
    if keys is None or any(known.get(op) is None for op in _VIEWS):
        return (
            "this torch computes fake views elsewhere: with a dimension of size 1 they may have "
            "other strides than eager's, for which compilers then trip"
        )
    for op in _VIEWS:
        known[op] = _with_eager_strides(known[op])
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
